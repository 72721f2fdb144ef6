-- How many chunks there are, and how many have a vector of the second model; as rag_owner.
select
    count.chunks,
    count.filled
from rag.count_fill() as count
