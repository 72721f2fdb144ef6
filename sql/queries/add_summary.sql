-- Keeps a summary beside its document and marks its messages, as rag_worker; how many, 0 when none of them is left.
-- id: uuid, the job; access_id: bigint; document_id: uuid; thread_id, summary_text, model: text; message_ids: uuid[]
select
    rag.add_summary(
        id => %(id)s,
        access_id => %(access_id)s,
        document_id => %(document_id)s,
        thread_id => %(thread_id)s,
        summary_text => %(summary_text)s,
        message_ids => %(message_ids)s,
        model => %(model)s
    ) as marked
