-- Sets what a tenant tells the model, and which generation that is; as rag_operator.
-- tenant_id, prompt: text; replaces: boolean
insert into rag.rag_prompts as told (tenant_id, prompt, replaces)
values (%(tenant_id)s, %(prompt)s, %(replaces)s)
on conflict (tenant_id) do update
set prompt = excluded.prompt,
    replaces = excluded.replaces,
    generation = told.generation + 1,
    updated_at = excluded.updated_at
returning told.generation
