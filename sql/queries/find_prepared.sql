-- Statements that the server keeps under the very name that the driver gave them: all, unless a pooler renames them.
select statement.name
from pg_prepared_statements as statement
where starts_with(statement.name, '_pg3_')
