-- Admits a login to a tenant; as rag_operator.
-- tenant_id, role_name, user_scope: text; tags, projects: text[]
insert into rag.rag_analysts (tenant_id, role_name, tags, projects, user_scope)
values (%(tenant_id)s, %(role_name)s, %(tags)s, %(projects)s, %(user_scope)s)
