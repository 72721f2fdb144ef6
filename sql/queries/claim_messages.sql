-- Gives the oldest open messages of a thread to the job that is to sum them up; how many.
-- access_id: bigint; thread_id: text; summary_id: uuid, the job; most_characters: bigint, after which no more are given
select
    rag.claim_messages(
        access_id => %(access_id)s,
        thread_id => %(thread_id)s,
        summary_id => %(summary_id)s,
        most_characters => %(most_characters)s
    ) as claimed
