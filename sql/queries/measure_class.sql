-- Counts the words of a class anew; how many chunks, lexemes and rows; no row when it is gone; as rag_operator.
-- tenant_id: text; access_id: bigint; at_least: chunks that a lexeme must be in
select measured.chunks, measured.lexemes, measured.statistics_rows
from rag.measure_class(
    tenant_id => %(tenant_id)s, access_id => %(access_id)s, at_least => %(at_least)s
) as measured
