-- The migration that this database is at, and the digests of the scripts that built it.
select
    version.version_num as revision,
    obj_description(to_regclass('rag.alembic_version'), 'pg_class') as digests
from rag.alembic_version as version
