-- The type of stored vectors and of arrays of them; no row where nothing is migrated yet.
select
    vector_type.oid,
    vector_type.typarray as array_oid
from pg_type as vector_type
where vector_type.oid = to_regtype('rag.halfvec')
