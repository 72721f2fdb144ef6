-- Keeps what the principal made of a source, or of the answer; kept is false when question or source are not theirs.
-- query_id: uuid; document_id: uuid or null; chunk_index: integer or null; rating: -1, 0, 1 or null; clicked: boolean
select rag.give_feedback(
    query_id => %(query_id)s,
    document_id => %(document_id)s,
    chunk_index => %(chunk_index)s,
    rating => %(rating)s,
    clicked => %(clicked)s
) as kept
