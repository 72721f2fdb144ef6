-- Makes a session that of the tables' owner, who alone builds and drops indexes, for as long as that takes.
-- memory_mb: of maintenance_work_mem, where the graph of a vector index is built; workers: processes besides the first
select
    set_config('role', 'rag_owner', false) as role,
    set_config('statement_timeout', '0', false) as statement_timeout,
    set_config('lock_timeout', '0', false) as lock_timeout,
    set_config('maintenance_work_mem', format('%%sMB', cast(%(memory_mb)s as text)), false) as memory,
    set_config('max_parallel_maintenance_workers', build.workers, false) as workers
from (
    -- CVE-2026-3172: before 0.8.2 a parallel build writes beyond its memory.
    select case
        when cast(string_to_array(extension.extversion, '.') as integer[]) < array[0, 8, 2] then '0'
        else cast(%(workers)s as text)
    end as workers
    from pg_extension as extension
    where extension.extname = 'vector'
) as build
