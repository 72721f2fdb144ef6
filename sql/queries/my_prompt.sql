-- What the principal's tenant tells the model; no row when it says nothing.
select
    told.prompt,
    told.replaces,
    told.generation
from rag.my_prompt() as told
