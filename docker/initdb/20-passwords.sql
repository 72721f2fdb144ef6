-- Run once by the database container, after sql/bootstrap.sql, on an empty volume: passwords for
-- the roles that log in. rag_operator gets none here, since only a person logs in as it.
-- MIGRATOR_PASSWORD, APP_PASSWORD, PUBLISHER_PASSWORD, WORKER_PASSWORD: environment, hexadecimal

-- A statement that fails would be logged with the password in it.
set log_min_error_statement = panic;
set log_statement = none;

\getenv migrator_password MIGRATOR_PASSWORD
\getenv app_password APP_PASSWORD
\getenv publisher_password PUBLISHER_PASSWORD
\getenv worker_password WORKER_PASSWORD

alter role rag_migrator password :'migrator_password';
alter role rag_app password :'app_password';
alter role rag_publisher password :'publisher_password';
alter role rag_worker password :'worker_password';
