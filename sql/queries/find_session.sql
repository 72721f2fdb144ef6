-- The server's process and transaction in which this is asked; a pooler may have several.
select
    pg_backend_pid() as process,
    transaction_timestamp() as began
