-- The models of the two columns of vectors, the active one first; no row where none was ever added; as rag_owner or
-- rag_operator.
select
    model.place,
    model.model_id,
    model.is_former,
    model.dimensions,
    model.changed_at
from rag.list_models() as model
order by model.place
