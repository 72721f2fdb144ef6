-- The statement that makes a login which may query the views. As a superuser.
-- role_name: text
select format('create role %%I login inherit in role rag_analyst', cast(%(role_name)s as text)) as statement
