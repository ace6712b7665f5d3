-- For operators: what to do where a server cannot tell that it may have lost what it confirmed, as after a copy of
-- its disks was put back, or a dump was loaded.

-- Has the transaction wait for the disk at its end, where its session does not.
CREATE FUNCTION fence_wait_for_disk()
RETURNS void LANGUAGE sql AS $fence$
    SELECT set_config('synchronous_commit', 'on', true)
    WHERE current_setting('synchronous_commit') IN ('off', 'local')
$fence$;

-- Makes all tokens of one partition dead, and ends its leases. Returns its failover floor.
--
-- Promotions since its last use count as well. A promotion moves further than a call: it may have lost one.
CREATE FUNCTION fence_after_failover_of(partition smallint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := fence_history();
    before text;
    dead bigint;
BEGIN
    PERFORM fence_wait_for_disk();
    -- Rows that are older than that column.
    UPDATE fence_resources AS f SET partition = fence_partition(f.resource) WHERE f.partition IS NULL;
    SELECT l.history INTO before FROM fence_floors AS l
    WHERE l.partition = fence_after_failover_of.partition FOR UPDATE;
    dead := fence_move_up(fence_after_failover_of.partition, fence_forgotten_epochs(before, here) + 500);
    UPDATE fence_floors AS l SET history = here, live_histories = ARRAY[here]
    WHERE l.partition = fence_after_failover_of.partition;
    UPDATE fence_resources AS f SET
        max_token = CASE WHEN dead IS NULL THEN f.max_token
            ELSE fence_dead_after(
                f.max_token, f.announced, dead, dead, fence_forgotten_epochs(f.history, here) + 500
            ) END,
        history = here
    WHERE f.partition = fence_after_failover_of.partition;
    PERFORM fence_end_outranked(f.resource) FROM fence_resources AS f
    WHERE f.partition = fence_after_failover_of.partition
        AND EXISTS (SELECT FROM fence_leases AS l WHERE l.resource = f.resource AND l.lease IS NOT NULL);
    RETURN dead;
END
$fence$;

-- The same for all partitions, each of which has to be done before anything is admitted there again.
CREATE FUNCTION fence_after_failover()
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $fence$
BEGIN
    FOR number IN 0 .. 255 LOOP
        PERFORM fence_after_failover_of(number::smallint);
    END LOOP;
    RETURN true;
END
$fence$;

-- Whether a changed time line makes tokens dead by itself, which is so from the beginning. Without that, whoever
-- promotes a server that may have lost something has to call fence_after_failover before it is written to. What has
-- happened before this call is treated as it would have been without it.
CREATE FUNCTION fence_notice_failover(enabled boolean)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $fence$
BEGIN
    PERFORM fence_wait_for_disk();
    PERFORM FROM fence_epoch_source FOR UPDATE;
    FOR number IN 0 .. 255 LOOP
        PERFORM fence_catch_up_partition(number::smallint);
    END LOOP;
    UPDATE fence_epoch_source AS s SET notices_failover = fence_notice_failover.enabled
    WHERE fence_notice_failover.enabled IS NOT NULL;
    RETURN (SELECT s.notices_failover FROM fence_epoch_source AS s);
END
$fence$;

DO $fence$
DECLARE
    made regprocedure;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'fence_wait_for_disk()',
        'fence_after_failover_of(smallint)',
        'fence_after_failover()',
        'fence_notice_failover(boolean)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', made, current_schema()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
END
$fence$;
