-- Rows that nobody has used for long are removed. What was dead stays dead, by the floor of their partition.

-- Removes rows of one partition that were not used for so long, at most so many, and returns how many. The
-- floor is locked first and for a short time only; a row that is in use is left.
--
-- A floor refuses whoever is below it. So a row is left where its token is not below `live`, the lowest one of a
-- lease that is held, or is above `granted`, what an issuer has surely granted: without that, the last epoch
-- that was handed out. One forged token closes no partition.
--
-- A row goes together with its lease in Postgres, which has been over for as long, and the floor is not below
-- either's token. A resource whose lease is held, or in whose line somebody stands, keeps its row, and so is above no
-- floor.
CREATE FUNCTION fence_remove_idle_of(
    partition smallint, older_than interval, at_most integer, granted bigint, live bigint
)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    idle_since CONSTANT timestamptz := CURRENT_TIMESTAMP - older_than;
    below bigint;
    place fence_floors;
    idle text[];
    in_use text[];
    removed integer;
    dead bigint;
    dead_by_lease bigint;
BEGIN
    IF (idle_since <= CURRENT_TIMESTAMP AND at_most > 0) IS NOT TRUE THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'older_than is a time of 0 or more, and at_most is 1 or more';
    END IF;
    SELECT * INTO place FROM fence_floors AS l WHERE l.partition = fence_remove_idle_of.partition;
    IF NOT FOUND THEN
        PERFORM fence_refuse_incomplete(fence_remove_idle_of.partition);
    END IF;
    granted := CASE
        WHEN place.history = fence_history() THEN coalesce(granted, fence_handed_out(place.partition))
        ELSE least(granted, fence_handed_out(place.partition))
    END;
    below := least(live, least(granted, 999999999999999) + 1);
    -- Looked for without a lock, which nobody has to wait for.
    idle := ARRAY(
        SELECT f.resource FROM fence_resources AS f LEFT JOIN fence_leases AS l ON l.resource = f.resource
        WHERE f.partition = fence_remove_idle_of.partition AND f.updated_at < idle_since
            AND greatest(f.max_token, f.announced, l.token) < below
            AND (
                f.history <> ALL (place.live_histories)
                AND greatest(f.max_token, f.announced)
                    > place.failover_floor - 1000 * fence_forgotten_epochs(f.history, place.history)
            ) IS NOT TRUE
            AND coalesce(l.expires_at + l.lock_delay < idle_since, true)
            AND NOT EXISTS (SELECT FROM fence_waiters AS w WHERE w.resource = f.resource)
        LIMIT at_most
    );
    IF cardinality(idle) = 0 THEN
        RETURN 0;
    END IF;
    BEGIN
        PERFORM FROM fence_floors AS l WHERE l.partition = fence_remove_idle_of.partition
            AND (l.history, l.live_histories, l.failover_floor)
                IS NOT DISTINCT FROM (place.history, place.live_histories, place.failover_floor)
        FOR UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        -- New resources of this partition are being written. Another time.
        RETURN 0;
    END;
    -- Tokens have died here meanwhile, which changes what may be removed. Another time.
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    idle := ARRAY(
        SELECT f.resource FROM fence_resources AS f
        WHERE f.resource = ANY (idle) AND f.updated_at < idle_since
            AND greatest(f.max_token, f.announced) < below
        FOR UPDATE SKIP LOCKED
    );
    -- A grant needs the row that is locked now, and nothing revives a lease that is over. So what is found
    -- here stays as it is.
    in_use := ARRAY(
        SELECT l.resource FROM fence_leases AS l
        WHERE l.resource = ANY (idle)
            AND (l.expires_at + l.lock_delay >= idle_since OR l.token >= below)
    );
    idle := ARRAY(SELECT name FROM unnest(idle) AS name WHERE name <> ALL (in_use));
    WITH gone AS (
        DELETE FROM fence_leases AS l
        USING (
            SELECT o.resource FROM fence_leases AS o WHERE o.resource = ANY (idle) FOR UPDATE SKIP LOCKED
        ) AS s
        WHERE l.resource = s.resource
        RETURNING l.token
    )
    SELECT max(g.token) INTO dead_by_lease FROM gone AS g;
    DELETE FROM fence_lines AS n WHERE n.resource = ANY (idle)
        AND NOT EXISTS (SELECT FROM fence_leases AS l WHERE l.resource = n.resource);
    WITH gone AS (
        DELETE FROM fence_resources AS f WHERE f.resource = ANY (idle)
            AND NOT EXISTS (SELECT FROM fence_leases AS l WHERE l.resource = f.resource)
        RETURNING greatest(f.max_token, f.announced) AS dead
    )
    SELECT count(*), max(g.dead) INTO removed, dead FROM gone AS g;
    UPDATE fence_floors AS l SET floor = greatest(dead, dead_by_lease)
    WHERE l.partition = fence_remove_idle_of.partition AND l.floor < greatest(dead, dead_by_lease);
    RETURN removed;
END
$fence$;

-- Writes down the partition of rows that are older than that column, at most so many, and returns how many.
CREATE FUNCTION fence_find_partitions(older_than interval, at_most integer)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER AS $fence$
DECLARE
    found_rows integer;
BEGIN
    UPDATE fence_resources AS f SET partition = fence_partition(f.resource)
    WHERE f.resource = ANY (ARRAY(
        SELECT o.resource FROM fence_resources AS o
        WHERE o.partition IS NULL AND o.updated_at < CURRENT_TIMESTAMP - older_than
        LIMIT at_most FOR UPDATE SKIP LOCKED
    ));
    GET DIAGNOSTICS found_rows = ROW_COUNT;
    RETURN found_rows;
END
$fence$;

-- Removes rows that were not used for so long, at most so many, and returns how many: those of one partition,
-- whichever has some. Called again and again, each time in a transaction of its own, it removes them all:
--
--     DO $$ BEGIN WHILE fence_remove_idle('90 days', 1000) > 0 LOOP COMMIT; END LOOP; END $$
--
-- `granted` is for issuers that know no epochs: the highest token that one has surely granted.
CREATE FUNCTION fence_remove_idle(older_than interval, at_most integer, granted bigint DEFAULT NULL)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    next_partition smallint;
    removed integer := 0;
BEGIN
    PERFORM fence_find_partitions(older_than, 1000);
    FOR next_partition IN SELECT l.partition FROM fence_floors AS l ORDER BY random() LOOP
        removed := fence_remove_idle_of(next_partition, older_than, at_most, granted, NULL);
        EXIT WHEN removed > 0;
    END LOOP;
    RETURN removed;
END
$fence$;

DO $fence$
DECLARE
    made regprocedure;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'fence_remove_idle_of(smallint, interval, integer, bigint, bigint)',
        'fence_find_partitions(interval, integer)',
        'fence_remove_idle(interval, integer, bigint)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', made, current_schema()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
    -- Shorter than the time after which a server looks for deadlocks.
    ALTER FUNCTION fence_remove_idle_of(smallint, interval, integer, bigint, bigint) SET lock_timeout = '50ms';
END
$fence$;

-- Default privileges of the schema may have given rights to others. What came with floors, protection, leases,
-- failovers, signed tokens and removal is for those to whom it is granted by name.
DO $fence$
DECLARE
    given record;
BEGIN
    FOR given IN
        SELECT DISTINCT o.object, CASE WHEN r.grantee = 0 THEN 'PUBLIC' ELSE quote_ident(pg_get_userbyid(r.grantee)) END
            AS grantee
        FROM (
            SELECT format('FUNCTION %s', p.oid::regprocedure), p.proacl, p.proowner FROM pg_proc AS p
            WHERE p.pronamespace = quote_ident(current_schema())::regnamespace AND p.proname LIKE 'fence\_%'
                AND p.proname NOT IN ('fence_admit', 'fence_raise', 'fence_max_token', 'fence_history')
            UNION ALL
            SELECT format('TABLE %s', c.oid::regclass), c.relacl, c.relowner FROM pg_class AS c
            WHERE c.oid IN (
                'fence_bypasses'::regclass, 'fence_leases'::regclass, 'fence_waiters'::regclass,
                'fence_lines'::regclass, 'fence_listeners'::regclass, 'fence_token_keys'::regclass
            )
        ) AS o (object, rights, owner), aclexplode(o.rights) AS r
        WHERE r.grantee <> o.owner
    LOOP
        EXECUTE format('REVOKE ALL ON %s FROM %s', given.object, given.grantee);
    END LOOP;
END
$fence$;
