-- The statements that take a login role out of rag_analyst, for an administrator: one for each who put it in.
-- role_name: text; as rag_operator
select format(
    'revoke rag_analyst from %%I granted by %%I',
    pg_get_userbyid(membership.member), pg_get_userbyid(membership.grantor)
) as statement
from pg_auth_members as membership
where membership.roleid = to_regrole('rag_analyst')
    and membership.member = to_regrole(quote_ident(%(role_name)s))
order by 1
