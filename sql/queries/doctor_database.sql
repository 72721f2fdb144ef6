-- The connected database, its name as SQL has to write it, and the login that asks.
select
    quote_ident(current_database()) as name,
    cast(session_user as text) as login,
    login.rolsuper as is_superuser,
    cast(extract(epoch from clock_timestamp()) as double precision) as seconds
from pg_roles as login
where login.rolname = session_user
