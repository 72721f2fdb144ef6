-- Records that a service key speaks for a principal; in a transaction of that principal.
-- tenant_id, key_id, project_id (null: none), action: text; user_id: bigint (0: none); tags: text[]
insert into rag.rag_assertions (tenant_id, key_id, user_id, project_id, tags, action)
values (%(tenant_id)s, %(key_id)s, %(user_id)s, %(project_id)s, %(tags)s, %(action)s)
