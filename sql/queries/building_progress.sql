-- How far a session is that builds an index: the phase, and which share of it is done, null when that is not known;
-- no row between two. Asked by the same login: others see no phase.
-- process: the session's process id
select
    building.phase,
    case
        when building.blocks_total > 0 then cast(building.blocks_done as double precision) / building.blocks_total
        when building.tuples_total > 0 then cast(building.tuples_done as double precision) / building.tuples_total
    end as share
from pg_stat_progress_create_index as building
where building.pid = %(process)s
