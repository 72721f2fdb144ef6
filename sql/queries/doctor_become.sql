-- Lets a superuser act as another login for the rest of the transaction.
-- role_name: text
select
    set_config('session_authorization', %(role_name)s, true),
    set_config('search_path', 'rag, pg_temp', true)
