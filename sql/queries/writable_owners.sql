-- Whose classes the principal may write, one row for each owner; no order.
select distinct
    class.scope,
    class.user_id,
    class.project_id
from rag.my_classes() as class
where class.may_write
