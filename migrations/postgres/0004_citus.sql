-- The fence on Citus, an extension that distributes the tables of a database over several servers.
--
-- On a server without Citus, the objects of this migration have no effect. Only servers with Citus
-- execute the statements that name its catalogs. column_beside() explains why.
--
-- Unless Citus uses two phases, it commits on the servers of the tables ("workers") before it
-- commits on the server to which the application is connected ("coordinator"). When Citus decides
-- whether two phases are needed, it ignores plain local tables of the coordinator. If the COMMIT on
-- the coordinator then failed, a write would remain on a worker without its token. Therefore
-- join_citus() makes each transaction that writes to a table of the fence commit in two phases.
--
-- In addition, distribute() stores each row of `resources` on the worker that stores the protected
-- rows, and Citus delegates an admission to that worker.

-- This table never contains a row. A statement that changes a table in the metadata of Citus makes
-- the transaction commit in two phases, whether or not the statement finds a row.
CREATE TABLE tower_fence.commit_marks (
    id integer PRIMARY KEY
);
COMMENT ON TABLE tower_fence.commit_marks IS
    'Always empty. On a coordinator of Citus, a transaction that writes to this table commits in two phases.';

CREATE FUNCTION tower_fence.commit_in_two_phases()
RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF to_regclass('pg_catalog.pg_dist_partition') IS NOT NULL THEN
        PERFORM FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = 'tower_fence.commit_marks'::regclass;
        IF NOT FOUND AND tower_fence.citus_role() = 'coordinator' THEN
            RAISE object_not_in_prerequisite_state USING
                MESSAGE = 'this server is the coordinator of a Citus cluster, which commits its workers first: a COMMIT '
                    'that fails would leave a write without its token',
                HINT = 'Migrate as the owner of the fence''s tables, which makes each such transaction commit in two phases.';
        END IF;
    END IF;
    DELETE FROM tower_fence.commit_marks WHERE id = 1;
    RETURN NULL;
END
$fence$;
COMMENT ON FUNCTION tower_fence.commit_in_two_phases IS
    'The trigger function of the fence''s tables in a database with Citus. Refuses a write on a coordinator on which '
    'join_citus() was not called.';

CREATE FUNCTION tower_fence.citus_role()
RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_extension AS e WHERE e.extname = 'citus') THEN
        RETURN 'none';
    END IF;
    RETURN CASE WHEN EXISTS (SELECT FROM pg_catalog.pg_dist_local_group WHERE groupid <> 0) THEN 'worker'
        WHEN EXISTS (SELECT FROM pg_catalog.pg_dist_node) THEN 'coordinator' ELSE 'alone' END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.citus_role IS
    'The role of this server in a Citus cluster: none (no Citus), alone (no other node is known), coordinator or worker.';

CREATE FUNCTION tower_fence.is_distributed()
RETURNS boolean LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF to_regclass('pg_catalog.pg_dist_partition') IS NULL THEN
        RETURN false;
    END IF;
    RETURN EXISTS (
        SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = 'tower_fence.resources'::regclass AND p.partmethod = 'h'
    );
END
$fence$;
COMMENT ON FUNCTION tower_fence.is_distributed IS 'Whether distribute() has distributed this fence.';

CREATE FUNCTION tower_fence.join_citus()
RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    role CONSTANT text := tower_fence.citus_role();
    relation regclass;
    failed text;
BEGIN
    IF role = 'none' THEN
        RETURN role;
    ELSIF role = 'worker' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'this server is a worker of a Citus cluster, where the fence has no tables of its own',
            HINT = 'Connect to the coordinator.';
    END IF;
    -- If a node is added later, the triggers refuse writes until this function is called again.
    IF role = 'coordinator' AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = 'tower_fence.commit_marks'::regclass
    ) THEN
        PERFORM citus_add_local_table_to_metadata('tower_fence.commit_marks'::regclass);
    END IF;
    -- The other tables of the fence need no trigger, because no write of the application changes
    -- them.
    FOREACH relation IN ARRAY ARRAY[
        'tower_fence.resources', 'tower_fence.epochs', 'tower_fence.idempotency_keys', 'tower_fence.leases',
        'tower_fence.bypasses'
    ]::regclass[] LOOP
        CONTINUE WHEN EXISTS (SELECT FROM pg_catalog.pg_dist_partition AS p WHERE p.logicalrelid = relation) OR EXISTS (
            SELECT FROM pg_trigger AS t WHERE t.tgrelid = relation AND t.tgname = 'fence_two_phases' AND t.tgenabled = 'A'
        );
        EXECUTE format(
            'CREATE OR REPLACE TRIGGER fence_two_phases AFTER INSERT OR UPDATE OR DELETE ON %s '
            'FOR EACH STATEMENT EXECUTE FUNCTION tower_fence.commit_in_two_phases()', relation
        );
        EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER fence_two_phases', relation);
    END LOOP;
    -- After alter_distributed_table(), the functions are still colocated with the earlier shards,
    -- so distribute the functions again.
    IF tower_fence.is_distributed() AND EXISTS (
        SELECT FROM run_command_on_workers(
            'SELECT count(*) FROM pg_catalog.pg_dist_object AS o '
            'JOIN pg_catalog.pg_dist_partition AS p ON p.colocationid = o.colocationid '
            'WHERE o.objid = ''tower_fence.try_admit(text, bigint, boolean)''::regprocedure '
            'AND p.logicalrelid = ''tower_fence.resources''::regclass'
        ) AS w WHERE w.result = '0'
    ) THEN
        PERFORM tower_fence.distribute_functions();
    END IF;
    -- On a worker that was added later, Citus has created the functions with the default privileges
    -- of PUBLIC, so revoke these privileges.
    SELECT min(w.result) FILTER (WHERE NOT w.success) INTO failed FROM run_command_on_workers(format(
        $worker$DO $revoke$
        DECLARE
            routine regprocedure;
        BEGIN
            PERFORM set_config('citus.enable_ddl_propagation', 'off', true);
            FOR routine IN
                SELECT p.oid FROM pg_catalog.pg_proc AS p
                WHERE (p.pronamespace = to_regnamespace(%L) OR p.prosecdef AND p.proname LIKE 'fence\_guard%%')
                    AND has_function_privilege('public', p.oid, 'EXECUTE')
            LOOP
                EXECUTE format('REVOKE ALL ON ROUTINE %%s FROM PUBLIC', routine);
            END LOOP;
        END
        $revoke$ $worker$,
        rtrim('tower_fence.', '.')
    )) AS w;
    IF failed IS NOT NULL THEN
        RAISE WARNING USING
            MESSAGE = concat('PUBLIC may be able to execute functions of the fence on a worker: ', failed),
            HINT = 'Migrate again when all nodes of the cluster can be reached.';
    END IF;
    RETURN role;
END
$fence$;
COMMENT ON FUNCTION tower_fence.join_citus IS
    'On a coordinator of Citus, makes each transaction that writes to the fence commit in two phases. Each migration '
    'calls it. Returns citus_role().';

-- A distributed fence ----------------------------------------------------------------------------
--
-- Rows of `resources` are on workers. Each row contains the history of its worker: the version, the
-- timeline and the system identifier. The timeline alone does not identify a worker, because every
-- new server has the same timeline. If the history of a row differs from that of its worker, either
-- the worker has failed over, or the row has moved from another worker. Tokens of such a resource
-- are refused until catch_up_workers() runs. The library, notice_failover() and after_failover()
-- call that function.
--
-- A token for a resource without a row is admitted above the floor of the partition under two
-- conditions. The shard of the resource must be on the same worker as when the floors were last
-- raised, and that worker must not have failed over since. `shards` contains the history of each
-- shard's worker. No removal raises a floor, because remove_idle() is refused. Therefore floors are
-- read without a lock.

CREATE TABLE tower_fence.shards (
    shard bigint PRIMARY KEY,
    history text COLLATE "C" NOT NULL
);
COMMENT ON TABLE tower_fence.shards IS
    'For each shard of a distributed fence, the history of its server at the last time when the floors were known to '
    'cover every token that the server may have lost.';

-- For leases, which are on the coordinator -------------------------------------------------------
--
-- Before a grant reads the lease, it locks the row of the resource on the worker, as a write does.
-- It also announces its token on the worker. The transaction commits in two phases. If the worker
-- cannot be reached after the coordinator has committed, the row stays locked until Citus has
-- completed the second phase. Therefore no older token is admitted after the grant.

CREATE FUNCTION tower_fence.lock_resource(resource text, lock_timeout text)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := tower_fence.current_history();
    own_partition CONSTANT smallint := tower_fence.partition_of(lock_resource.resource);
    own_floor bigint;
    highest bigint;
BEGIN
    PERFORM tower_fence.check_resource(lock_resource.resource);
    PERFORM set_config('lock_timeout', lock_resource.lock_timeout, true), tower_fence.wait_for_disk();
    FOR attempt IN 1 .. 2 LOOP
        SELECT greatest(r.max_token, r.announced) INTO highest FROM tower_fence.resources AS r
        WHERE r.resource = lock_resource.resource AND r.history = here FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
        own_floor := tower_fence.floor_of(lock_resource.resource, own_partition, here);
        EXIT WHEN own_floor IS NULL;
        INSERT INTO tower_fence.resources AS r (resource, max_token, updated_at, partition, history)
        VALUES (lock_resource.resource, own_floor, CURRENT_TIMESTAMP, own_partition, here)
        ON CONFLICT (resource) DO NOTHING;
    END LOOP;
    RETURN highest;
END
$fence$;
COMMENT ON FUNCTION tower_fence.lock_resource IS
    'Locks the row of a resource on its worker, after inserting the row if it is missing. Returns the highest token '
    'that the fence has received for the resource, or null if the worker has another history.';

CREATE FUNCTION tower_fence.is_behind(resource text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
DECLARE
    here CONSTANT text := tower_fence.current_history();
    own_history text;
BEGIN
    SELECT r.history INTO own_history FROM tower_fence.resources AS r WHERE r.resource = is_behind.resource;
    RETURN CASE WHEN FOUND THEN own_history <> here
        ELSE tower_fence.floor_of(is_behind.resource, tower_fence.partition_of(is_behind.resource), here) IS NULL END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.is_behind IS
    'Whether the history in the row of a resource differs from the history of its worker. For a resource without a '
    'row, the known history of its shard is compared instead.';

-- The settings of the coordinator's session do not reach the worker. Therefore the admission passes
-- the timeouts as arguments, and sets them in the transaction of the worker.
CREATE FUNCTION tower_fence.admit_within(
    resource text, token bigint, reusable boolean, lock_timeout text, idle_timeout text, durable boolean,
    OUT outcome text, OUT max_token bigint, OUT by_floor boolean, OUT announced boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    PERFORM set_config('lock_timeout', admit_within.lock_timeout, true),
        set_config('idle_in_transaction_session_timeout', admit_within.idle_timeout, true),
        set_config('client_connection_check_interval', '1000', true);
    IF admit_within.durable THEN
        PERFORM tower_fence.wait_for_disk();
    END IF;
    SELECT a.outcome, a.max_token, a.by_floor, a.announced INTO outcome, max_token, by_floor, announced
    FROM tower_fence.try_admit(admit_within.resource, admit_within.token, admit_within.reusable) AS a;
END
$fence$;
COMMENT ON FUNCTION tower_fence.admit_within IS
    'The try_admit() of a distributed fence, with timeouts for the transaction of the worker.';

CREATE FUNCTION tower_fence.refuse_behind(resource text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    -- Until Citus has synchronized its metadata, it does not delegate calls. The functions then run
    -- on the coordinator, whose history is different.
    IF EXISTS (
        SELECT FROM pg_catalog.pg_dist_node AS n, pg_catalog.pg_dist_local_group AS l
        WHERE l.groupid = 0 AND n.isactive AND n.hasmetadata AND NOT n.metadatasynced
    ) THEN
        RAISE cannot_connect_now USING
            MESSAGE = concat('Citus has not synchronized its metadata, so it cannot delegate calls for ',
                refuse_behind.resource),
            HINT = 'Retry the transaction.';
    END IF;
    RAISE cannot_connect_now USING
        MESSAGE = concat('the shard of ', refuse_behind.resource, ' was last used on another server, or before a failover'),
        HINT = 'Call tower_fence.notice_failover(NULL) on the coordinator. The call makes the earlier tokens stale, '
            'unless the shard has only moved.';
END
$fence$;
COMMENT ON FUNCTION tower_fence.refuse_behind IS
    'Raises 57P03 for a resource whose shard has moved or whose worker has failed over, or if Citus cannot delegate '
    'calls to the worker yet.';

-- A lease whose resource has no row is broken as well, because a worker that failed over may have
-- lost the row.
CREATE FUNCTION tower_fence.end_superseded_leases()
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    held text[];
    tokens bigint[];
    valid text[];
BEGIN
    -- As in end_superseded(), a break at a stricter isolation level could miss a waiter.
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RETURN false;
    END IF;
    -- Read the leases before the rows. A lease that is granted or gets a new token in the meantime
    -- is not broken, because its token no longer matches.
    SELECT array_agg(l.resource), array_agg(l.token) INTO held, tokens FROM tower_fence.leases AS l
    WHERE l.expires_at + l.lock_delay > clock_timestamp();
    valid := ARRAY(
        SELECT l.resource FROM tower_fence.leases AS l
        JOIN tower_fence.resources AS r ON r.resource = l.resource COLLATE "C"
        WHERE l.token >= r.max_token
    );
    -- Skip leases that another transaction has locked. Their next renewals report the loss.
    PERFORM tower_fence.break_lease(l.resource, h.token)
    FROM unnest(held, tokens) AS h (resource, token), LATERAL (
        SELECT o.resource FROM tower_fence.leases AS o WHERE o.resource = h.resource FOR UPDATE SKIP LOCKED
    ) AS l
    WHERE h.resource NOT IN (SELECT unnest(valid));
    RETURN FOUND;
END
$fence$;
COMMENT ON FUNCTION tower_fence.end_superseded_leases IS
    'Breaks all leases of a distributed fence whose tokens are stale, as end_superseded() does for one resource.';

-- If a shard has only moved, its tokens stay valid. If each known history is still the history of a
-- node, and each unknown history has timeline 1 (the timeline of a new worker), the function
-- concludes that no worker has failed over. The rows of a shard that was split may come from
-- several workers, so a split counts as a failover. Servers that were copied from one data
-- directory have the same system identifier, so their histories do not distinguish them. With such
-- servers, each move counts as a failover.
CREATE FUNCTION tower_fence.catch_up_workers(calls bigint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = on AS $fence$
DECLARE
    known text[];
    stored text[];
    reported text[];
    found_shards bigint[];
    found_histories text[];
    is_behind boolean;
    is_split boolean;
    has_failed_over boolean;
    is_requested CONSTANT boolean := calls > 0;
    -- At least one, because notice_failover() passes 0 calls.
    forgotten CONSTANT bigint := least(1000 * greatest(calls, 1), 999999);
    stale bigint[] := array_fill(0::bigint, ARRAY[256]);
    failed text;
BEGIN
    PERFORM tower_fence.wait_for_disk();
    -- The row lock serializes the calls. The function reads the shards after it has this lock, so a
    -- later call does not repeat the work of an earlier call for the same failover.
    PERFORM FROM tower_fence.epoch_source FOR UPDATE;
    known := ARRAY(SELECT DISTINCT k.history FROM tower_fence.shards AS k);
    -- after_failover() is safe because the histories are read before the floors are raised above
    -- all granted tokens. Afterwards, only rows and shards with exactly these histories count as
    -- known. Each result contains the history of the shard's server, and the other histories of its
    -- rows.
    SELECT array_agg(s.shardid), array_agg(split_part(s.result, ',', 1)), string_to_array(string_agg(s.result, ','), ','),
        bool_or(s.result IS DISTINCT FROM (SELECT k.history FROM tower_fence.shards AS k WHERE k.shard = s.shardid)),
        bool_or(NOT EXISTS (SELECT FROM tower_fence.shards AS k WHERE k.shard = s.shardid)),
        min(s.result) FILTER (WHERE NOT s.success)
    INTO found_shards, found_histories, stored, is_behind, is_split, failed
    FROM run_command_on_shards('tower_fence.resources',
        'SELECT pg_catalog.concat_ws('','', h, (SELECT pg_catalog.string_agg(DISTINCT r.history, '','') FROM %s AS r '
        'WHERE r.history <> h)) FROM tower_fence.current_history() AS h'
    ) AS s;
    IF failed IS NOT NULL THEN
        RAISE cannot_connect_now USING
            MESSAGE = concat('a worker cannot be reached: ', failed),
            HINT = 'Retry when all nodes of the cluster can be reached.';
    END IF;
    IF NOT (is_behind OR is_requested) THEN
        RETURN false;
    END IF;
    -- The nodes are read after the shards, so a failover between the two reads is detected.
    reported := ARRAY(
        SELECT n.result FROM run_command_on_all_nodes('SELECT tower_fence.current_history()') AS n WHERE n.success
    );
    has_failed_over := is_requested OR is_split OR NOT known || stored <@ reported
        OR EXISTS (SELECT FROM unnest(found_histories) AS h WHERE h <> ALL (known) AND substr(h, 3, 8) <> '00000001')
        OR cardinality(reported) > (SELECT count(DISTINCT substr(h, 11)) FROM unnest(reported) AS h);
    IF is_requested OR has_failed_over AND (SELECT s.notices_failover FROM tower_fence.epoch_source AS s) THEN
        INSERT INTO tower_fence.epochs AS e (partition, epoch)
        SELECT number, forgotten FROM generate_series(0, 255) AS number
        WHERE EXISTS (SELECT FROM tower_fence.epochs AS o WHERE o.epoch > 0)
        ON CONFLICT (partition) DO UPDATE SET epoch = least(e.epoch + forgotten, 999999);
        IF FOUND THEN
            stale := ARRAY(SELECT e.epoch * 1000000000 + 999999999 FROM tower_fence.epochs AS e ORDER BY e.partition);
        END IF;
    END IF;
    UPDATE tower_fence.floors AS l SET
        floor = greatest(l.floor, stale[l.partition + 1]),
        failover_floor = greatest(l.failover_floor, stale[l.partition + 1]);
    -- Each shard is updated in a separate transaction, which may commit before this one. If this
    -- transaction then fails, more tokens than necessary are stale, and the next call repeats the
    -- update. LOCK TABLE waits for transactions that have inserted rows, because these rows are not
    -- visible yet. A transaction that has locked a row may itself wait for this call. The deadlock
    -- detection of Citus does not see the transactions of the shards, so lock_timeout limits the
    -- waits.
    SELECT min(s.result) FILTER (WHERE NOT s.success) INTO failed
    FROM run_command_on_shards('tower_fence.resources', format(
        'DO $do$ BEGIN '
        'PERFORM pg_catalog.set_config(''lock_timeout'', %L, true), '
            'pg_catalog.set_config(''citus.enable_manual_changes_to_shards'', ''on'', true); '
        'IF %L THEN LOCK TABLE %%1$s IN EXCLUSIVE MODE; END IF; '
        'UPDATE %%1$s AS r SET max_token = tower_fence.max_token_after('
            'r.max_token, r.announced, (%L::bigint[])[r.partition + 1], %s), '
            'history = tower_fence.current_history(), admitted_by = NULL '
        'WHERE (%L OR r.history <> tower_fence.current_history()) AND tower_fence.current_history() = ANY (%L::text[]); '
        'END $do$',
        coalesce(nullif(current_setting('lock_timeout'), '0'), '10s'), is_requested, stale, forgotten, is_requested,
        found_histories
    )) AS s;
    IF failed LIKE '%lock timeout%' THEN
        RAISE lock_not_available USING
            MESSAGE = concat('a transaction that has written on a worker is still open: ', failed);
    ELSIF failed IS NOT NULL THEN
        RAISE cannot_connect_now USING MESSAGE = concat('a worker could not catch up: ', failed);
    END IF;
    -- A split replaces a shard with shards that have other numbers.
    DELETE FROM tower_fence.shards AS s WHERE s.shard <> ALL (found_shards);
    FOR place IN 1 .. cardinality(found_shards) LOOP
        INSERT INTO tower_fence.shards AS s (shard, history) VALUES (found_shards[place], found_histories[place])
        ON CONFLICT (shard) DO UPDATE SET history = excluded.history;
    END LOOP;
    IF stale[1] > 0 THEN
        PERFORM tower_fence.end_superseded_leases();
    END IF;
    -- A probe is rolled back, so each probe would log the same line.
    IF current_setting('tower_fence.is_probe', true) IS DISTINCT FROM 'on' THEN
        RAISE LOG USING MESSAGE = concat('tower-fence: ', CASE
            WHEN stale[1] = 0 THEN 'the current histories of the shards were recorded, and no tokens became stale'
            WHEN is_requested THEN 'after_failover() was called: all earlier tokens are stale'
            ELSE 'a worker has failed over: earlier tokens for its resources, and for resources without a row, are stale'
        END);
    END IF;
    RETURN CASE WHEN is_requested THEN stale[1] > 0 ELSE has_failed_over END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.catch_up_workers IS
    'The after_failover() of a distributed fence. With 0 calls, changes nothing if no history has changed, and keeps the '
    'tokens valid if shards have only moved. Returns whether tokens may have become stale.';

-- Changes the functions whose bodies depend on the location of the rows. The privileges on these
-- functions do not change.
CREATE FUNCTION tower_fence.distribute_functions()
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    routine regproc;
BEGIN
    -- This function is VOLATILE, so that Citus refuses the statement of a process that started
    -- before distribute() and does not know yet that the rows are on workers.
    CREATE OR REPLACE FUNCTION tower_fence.current_history()
    RETURNS text LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    BEGIN
        IF pg_is_in_recovery() THEN
            RETURN NULL;
        END IF;
        RETURN concat(
            left(current_setting('server_version_num'), 2), left(pg_walfile_name(pg_current_wal_lsn()), 8),
            ':', (SELECT c.system_identifier FROM pg_control_system() AS c)
        );
    END
    $body$;
    -- Returns null if the known history of the shard is not `here`.
    CREATE OR REPLACE FUNCTION tower_fence.floor_of(resource text, partition smallint, here text)
    RETURNS bigint LANGUAGE plpgsql AS $body$
    DECLARE
        own_shard CONSTANT bigint := get_shard_id_for_distribution_column(
            'tower_fence.resources'::regclass, floor_of.resource
        );
        own_floor bigint;
    BEGIN
        PERFORM FROM tower_fence.shards AS s WHERE s.shard = own_shard AND s.history = here;
        IF NOT FOUND THEN
            RETURN NULL;
        END IF;
        -- A separate statement reads the floor, so that it sees at least the floors that were
        -- committed together with that row of `shards`.
        SELECT l.floor INTO own_floor FROM tower_fence.floors AS l
        WHERE l.partition = floor_of.partition;
        IF NOT FOUND THEN
            PERFORM tower_fence.refuse_incomplete(floor_of.partition);
        END IF;
        RETURN own_floor;
    END
    $body$;
    CREATE OR REPLACE FUNCTION tower_fence.catch_up_in_transaction(resource text)
    RETURNS boolean LANGUAGE sql AS 'SELECT tower_fence.refuse_behind(catch_up_in_transaction.resource)';
    -- The following functions run on the coordinator. Citus delegates a call to a function only if
    -- the call is in FROM.
    CREATE OR REPLACE FUNCTION tower_fence.catch_up(resource text)
    RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
    DECLARE
        is_behind boolean;
    BEGIN
        SELECT b.is_behind INTO is_behind FROM tower_fence.is_behind(catch_up.resource) AS b (is_behind);
        RETURN is_behind AND tower_fence.catch_up_workers(0);
    END
    $body$;
    -- A failover of the coordinator may lose a grant whose token the worker has not seen, so the
    -- partition catches up first.
    CREATE OR REPLACE FUNCTION tower_fence.next_token(resource text)
    RETURNS bigint LANGUAGE plpgsql AS $body$
    DECLARE
        own_partition CONSTANT smallint := tower_fence.partition_of(next_token.resource);
        lock_timeout CONSTANT text := current_setting('lock_timeout');
        highest bigint;
    BEGIN
        PERFORM tower_fence.catch_up_partition(own_partition);
        SELECT a.highest INTO highest
        FROM tower_fence.lock_resource(next_token.resource, lock_timeout) AS a (highest);
        IF highest IS NULL THEN
            PERFORM tower_fence.refuse_behind(next_token.resource);
        END IF;
        RETURN greatest(highest, tower_fence.epoch_of_leases(own_partition) * 1000000000) + 1;
    END
    $body$;

    -- Functions that were created before the extension are not on the workers.
    FOREACH routine IN ARRAY ARRAY[
        'tower_fence.current_history', 'tower_fence.wait_for_disk', 'tower_fence.partition_of', 'tower_fence.refuse_malformed',
        'tower_fence.refuse_incomplete', 'tower_fence.refuse_stale', 'tower_fence.refuse_behind', 'tower_fence.check_token',
        'tower_fence.check_resource', 'tower_fence.is_distributed', 'tower_fence.refuse_unfenced',
        'tower_fence.require_admission', 'tower_fence.warn_outside_transaction', 'tower_fence.header_tokens',
        'tower_fence.max_token_after', 'tower_fence.stale_up_to', 'tower_fence.floor_of',
        'tower_fence.catch_up_in_transaction'
    ]::regproc[] LOOP
        PERFORM create_distributed_function(routine) WHERE NOT EXISTS (
            SELECT FROM pg_catalog.pg_dist_object AS o WHERE o.classid = 'pg_proc'::regclass AND o.objid = routine
        );
    END LOOP;
    FOREACH routine IN ARRAY ARRAY[
        'tower_fence.try_admit', 'tower_fence.admit', 'tower_fence.admit_within', 'tower_fence.admit_header',
        'tower_fence.try_raise', 'tower_fence.raise', 'tower_fence.announce', 'tower_fence.max_token',
        'tower_fence.lock_resource', 'tower_fence.is_behind'
    ]::regproc[] LOOP
        PERFORM create_distributed_function(routine, 'resource',
            colocate_with => 'tower_fence.resources', force_delegation => true);
    END LOOP;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.distribute_functions IS 'Creates the functions of a distributed fence, for distribute().';

CREATE FUNCTION tower_fence.distribute(relation regclass DEFAULT NULL)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s' AS $fence$
DECLARE
    role CONSTANT text := tower_fence.citus_role();
    before CONSTANT text := tower_fence.current_history();
    here text;
    key record;
    shard record;
    grantee text;
    collation_name text := '"C"';
    guarded text;
BEGIN
    IF role <> 'coordinator' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = concat('this server is not the coordinator of a Citus cluster: ', CASE role
                WHEN 'none' THEN 'this database does not have the extension citus'
                WHEN 'alone' THEN 'no other node was added to it'
                ELSE 'it is a worker' END);
    ELSIF tower_fence.is_distributed() THEN
        PERFORM tower_fence.join_citus();
        RETURN false;
    ELSIF before = '' THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = 'a distributed fence needs failover detection, and this fence was migrated without it';
    END IF;
    guarded := (SELECT string_agg(DISTINCT g.relation::text, ', ') FROM tower_fence.protected_tables AS g);
    IF guarded IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = concat('there are protected tables, whose guards read the fence on this server: ', guarded),
            HINT = 'Call tower_fence.unprotect() first, and protect() afterwards for the tables that are colocated with '
                'the fence.';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_dist_node AS n WHERE n.groupid <> 0 AND n.isactive) THEN
        RAISE object_not_in_prerequisite_state USING MESSAGE = 'the cluster has no worker';
    END IF;
    IF relation IS NOT NULL THEN
        SELECT p.partmethod, a.atttypid, a.attcollation, a.attname, c.collisdeterministic INTO key
        FROM pg_catalog.pg_dist_partition AS p
        JOIN pg_attribute AS a ON a.attrelid = p.logicalrelid
            AND a.attname = column_to_column_name(p.logicalrelid, p.partkey)
        LEFT JOIN pg_collation AS c ON c.oid = a.attcollation WHERE p.logicalrelid = relation;
        IF key.partmethod IS DISTINCT FROM 'h' THEN
            RAISE wrong_object_type USING
                MESSAGE = format('%s is not distributed by a column: call create_distributed_table() first', relation);
        ELSIF key.atttypid <> 'text'::regtype THEN
            RAISE wrong_object_type USING
                MESSAGE = format('%s is distributed by %I of type %s: the distribution column must have the type text',
                    relation, key.attname, key.atttypid::regtype),
                HINT = 'Distribute it by a column of type text that contains the names of the resources, or call '
                    'tower_fence.distribute() without a table.';
        ELSIF NOT key.collisdeterministic THEN
            RAISE wrong_object_type USING
                MESSAGE = format('%s is distributed by %I, whose collation treats different names as equal',
                    relation, key.attname);
        END IF;
        collation_name := (
            SELECT format('%I.%I', n.nspname, c.collname)
            FROM pg_collation AS c JOIN pg_namespace AS n ON n.oid = c.collnamespace WHERE c.oid = key.attcollation
        );
    END IF;
    -- This transaction changes both functions and rows, so Citus must use a single connection to
    -- each node.
    PERFORM set_config('citus.multi_shard_modify_mode', 'sequential', true);
    -- These locks prevent admissions until the transaction ends.
    LOCK TABLE tower_fence.resources, tower_fence.floors IN ACCESS EXCLUSIVE MODE;
    PERFORM tower_fence.catch_up_partition(number::smallint) FROM generate_series(0, 255) AS number;
    DROP TRIGGER IF EXISTS fence_two_phases ON tower_fence.resources;
    -- Citus stores equal values of two columns together only if both have the same type and
    -- collation.
    EXECUTE format(
        'ALTER TABLE tower_fence.resources ALTER COLUMN resource TYPE text COLLATE %s, '
        'DROP CONSTRAINT IF EXISTS resource_name, ADD CONSTRAINT resource_name CHECK (octet_length(resource) BETWEEN 1 AND 255)',
        collation_name
    );
    PERFORM create_distributed_table('tower_fence.resources', 'resource', colocate_with => coalesce(relation::text, 'none'));
    PERFORM create_reference_table('tower_fence.floors'), create_reference_table('tower_fence.shards');
    PERFORM truncate_local_data_after_distributing_table('tower_fence.resources');
    IF EXISTS (
        SELECT FROM pg_catalog.pg_dist_shard AS s JOIN pg_catalog.pg_dist_placement AS p ON p.shardid = s.shardid
        WHERE s.logicalrelid = 'tower_fence.resources'::regclass GROUP BY s.shardid HAVING count(*) > 1
    ) THEN
        RAISE feature_not_supported USING
            MESSAGE = 'citus.shard_replication_factor must be 1, because an admission can be delegated to only one worker';
    END IF;
    PERFORM tower_fence.distribute_functions();
    -- On a worker, Citus grants the same privileges as on the coordinator, but does not revoke the
    -- default privileges of PUBLIC.
    EXECUTE format('REVOKE ALL ON ALL ROUTINES IN SCHEMA %s FROM PUBLIC', rtrim('tower_fence.', '.'));
    -- A role that may execute try_admit() may also execute admit_within().
    FOR grantee IN
        SELECT quote_ident(pg_get_userbyid(a.grantee)) FROM pg_proc AS p, aclexplode(p.proacl) AS a
        WHERE p.oid = 'tower_fence.try_admit'::regproc AND a.grantee NOT IN (0, p.proowner)
    LOOP
        EXECUTE concat('GRANT EXECUTE ON FUNCTION tower_fence.admit_within TO ', grantee);
    END LOOP;
    -- If the tables were restored from the dump of a distributed fence, this table contains the
    -- shards of the other cluster.
    DELETE FROM tower_fence.shards;
    -- A floor or a row that had caught up gets its new history, because the distribution loses no
    -- tokens. Any other floor or row keeps its history and is caught up later.
    here := tower_fence.current_history();
    UPDATE tower_fence.floors AS l SET history = here, unchanged_histories = l.unchanged_histories || here
    WHERE l.history = before;
    -- run_command_on_all_nodes() uses other connections, which do not see the new current_history()
    -- before the end of this transaction, so the command repeats the body of that function.
    FOR shard IN
        SELECT s.shardid, s.shardminvalue::integer AS lowest, s.shardmaxvalue::integer AS highest, n.result, n.success
        FROM pg_catalog.pg_dist_shard AS s JOIN pg_catalog.pg_dist_placement AS p ON p.shardid = s.shardid
        JOIN pg_catalog.pg_dist_node AS d ON d.groupid = p.groupid AND d.noderole = 'primary'
        JOIN run_command_on_all_nodes('SELECT concat(left(current_setting(''server_version_num''), 2), '
            'left(pg_walfile_name(pg_current_wal_lsn()), 8), '':'', c.system_identifier) FROM pg_control_system() AS c'
        ) AS n ON n.nodeid = d.nodeid
        WHERE s.logicalrelid = 'tower_fence.resources'::regclass
    LOOP
        IF NOT shard.success THEN
            RAISE cannot_connect_now USING MESSAGE = concat('a node cannot be reached: ', shard.result);
        END IF;
        INSERT INTO tower_fence.shards (shard, history) VALUES (shard.shardid, shard.result);
        UPDATE tower_fence.resources AS r SET history = shard.result, admitted_by = NULL
        WHERE hashtext(r.resource) BETWEEN shard.lowest AND shard.highest AND r.history = before;
    END LOOP;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.distribute IS
    'Distributes the rows of the fence over the workers of a Citus cluster. With a table, each row is stored together '
    'with the rows of the table whose distribution column contains the name of the resource, so that the check and the '
    'write are one transaction on one worker. Without a table, a row can be on any worker. Call this function once, on '
    'the coordinator, as the owner of the fence. Returns false if the fence is already distributed.';
