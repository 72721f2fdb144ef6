-- Of the chunks nearest to a question by the active model, how many are so by the second one as well.
-- embedding, second_embedding: halfvec as text; top_k: rows
select
    compared.active_found,
    compared.second_found,
    compared.shared
from rag.compare_models(
    cast(%(embedding)s as halfvec), cast(%(second_embedding)s as halfvec), %(top_k)s
) as compared
