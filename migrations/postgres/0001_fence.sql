-- The fence: the highest stale token of each resource, and the functions that compare and raise it.
--
-- All objects are in one schema, `tower_fence`. If the fence has another schema, the migration
-- replaces `tower_fence` in this text with the name of that schema. Migrations and functions run
-- with the search_path `pg_catalog, pg_temp`, so that no object of another role changes the meaning
-- of a statement. Functions with SECURITY DEFINER run with the privileges of their owner. A role
-- that is granted EXECUTE on such a function needs no privilege on the tables. Nothing is granted
-- to PUBLIC.
--
-- A refusal is an error with its own SQLSTATE: TF400 for an invalid token or resource name, TF412
-- for a stale token, TF403 for a token of another resource. For TF412 and TF403, its DETAIL is a
-- JSON object for programs.
--
-- A session keeps the plan of a statement until the table is analyzed. A plan that was made for a
-- small table reads the whole table in each call, even after the table has grown. Therefore the
-- functions that run for each write and each lease set `enable_seqscan = off`. The functions that
-- they call inherit the setting when their plans are made.

DO $fence$
DECLARE
    home CONSTANT text := rtrim('tower_fence.', '.');
BEGIN
    IF current_setting('server_version_num')::integer < 140000 THEN
        RAISE feature_not_supported USING
            MESSAGE = concat('tower-fence needs Postgres 14 or later, not ', current_setting('server_version'));
    ELSIF version() ~ '(CockroachDB|-YB-)' THEN
        RAISE feature_not_supported USING MESSAGE = concat('tower-fence needs Postgres, not ', version());
    ELSIF current_setting('server_encoding') <> 'UTF8' THEN
        -- Resource names are UTF-8. Another encoding cannot store all of them.
        RAISE feature_not_supported USING
            MESSAGE = concat('tower-fence needs a database with the encoding UTF8, not ',
                current_setting('server_encoding')),
            HINT = 'Create a database with ENCODING ''UTF8'' TEMPLATE template0.';
    ELSIF to_regclass('tower_fence.floors') IS NOT NULL THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = concat('the schema ', home, ' has tables of the fence, but no migration history'),
            HINT = 'If the tables are empty because a dump without data was restored, drop the schema and migrate again. '
                'Otherwise restore the rows of the table migrations: without its data, the fence admits stale tokens.';
    ELSIF EXISTS (
        SELECT FROM pg_depend AS d
        WHERE d.refclassid = 'pg_namespace'::regclass AND d.refobjid = to_regnamespace(home)
            AND d.classid IN ('pg_class'::regclass, 'pg_proc'::regclass, 'pg_type'::regclass)
            AND d.objid IS DISTINCT FROM to_regclass('tower_fence.migrations')
    ) THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = concat('the schema ', home, ' has objects that do not belong to the fence'),
            HINT = 'Each migration sets the owners and the privileges of all objects in the schema. Choose a schema '
                'that only the fence uses.';
    END IF;
END
$fence$;

-- Domains define the ranges of columns, because Postgres parses the CHECK constraints of a table
-- again for each statement that writes to the table. Parsing CHECK constraints on `resources` took
-- a fifth of the time of an admission.
CREATE DOMAIN tower_fence.resource_name AS text COLLATE "C" CHECK (octet_length(VALUE) BETWEEN 1 AND 255);
COMMENT ON DOMAIN tower_fence.resource_name IS
    'A name of 1 to 255 bytes. Names are compared byte by byte, so that a new version of the C library cannot change '
    'the order of an index.';
CREATE DOMAIN tower_fence.highest_token AS bigint CHECK (VALUE BETWEEN 0 AND 999999999999999);
COMMENT ON DOMAIN tower_fence.highest_token IS
    'The highest token with some property, or 0 if no token has the property.';
CREATE DOMAIN tower_fence.partition_number AS smallint CHECK (VALUE BETWEEN 0 AND 255);
COMMENT ON DOMAIN tower_fence.partition_number IS 'The number of one of the 256 partitions of the resource names.';
CREATE DOMAIN tower_fence.epoch_number AS bigint CHECK (VALUE BETWEEN 0 AND 999999);
COMMENT ON DOMAIN tower_fence.epoch_number IS 'An epoch of tokens, or 0 if there is none.';
CREATE DOMAIN tower_fence.sha256_digest AS bytea CHECK (octet_length(VALUE) = 32);
CREATE DOMAIN tower_fence.http_status AS smallint CHECK (VALUE BETWEEN 100 AND 999);

CREATE TABLE tower_fence.resources (
    resource tower_fence.resource_name PRIMARY KEY,
    max_token tower_fence.highest_token NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    announced tower_fence.highest_token NOT NULL DEFAULT 0,
    announced_lease tower_fence.sha256_digest,
    partition tower_fence.partition_number NOT NULL,
    admitted_by xid8,
    history text COLLATE "C" NOT NULL
    -- Free space in each page keeps new row versions on the same page (HOT).
) WITH (fillfactor = 70);
CREATE INDEX resources_partition ON tower_fence.resources (partition);
COMMENT ON TABLE tower_fence.resources IS
    'The highest stale token of each resource. Do not delete rows; instead, CALL tower_fence.remove_idle().';
COMMENT ON COLUMN tower_fence.resources.max_token IS 'The highest stale token. Only a greater token is admitted.';
COMMENT ON COLUMN tower_fence.resources.announced IS
    'The highest token that was announced as granted, or 0 if no token was announced.';
COMMENT ON COLUMN tower_fence.resources.announced_lease IS
    'SHA-256 of the digest of the lease id of the announced grant, or null if a higher token was used or raised since. '
    'The fence recognizes a repeated announcement by this hash, which cannot be used to release the lease.';
COMMENT ON COLUMN tower_fence.resources.admitted_by IS
    'The last transaction in which a token was admitted. The guard of a protected table compares it with the '
    'transaction that writes.';
COMMENT ON COLUMN tower_fence.resources.history IS
    'The timeline of the server at the last change of the row. If the server is on another timeline, no token is '
    'admitted for the resource until catch_up() has updated the row.';

CREATE TABLE tower_fence.floors (
    partition tower_fence.partition_number PRIMARY KEY,
    floor tower_fence.highest_token NOT NULL DEFAULT 0,
    history text COLLATE "C" NOT NULL,
    unchanged_histories text[] COLLATE "C" NOT NULL,
    failover_floor tower_fence.highest_token NOT NULL DEFAULT 0
    -- Each page has few rows, because many transactions lock rows of this table at the same time.
) WITH (fillfactor = 10);
COMMENT ON TABLE tower_fence.floors IS
    'For each of the 256 partitions, the highest stale token of the resources that have no row.';
COMMENT ON COLUMN tower_fence.floors.history IS 'The timeline of the server to which the partition has caught up.';
COMMENT ON COLUMN tower_fence.floors.unchanged_histories IS
    'The timelines since the last failover that made tokens of the partition stale. A row that has one of these '
    'timelines keeps its max_token when it catches up.';
COMMENT ON COLUMN tower_fence.floors.failover_floor IS
    'The highest token of the partition that a failover has made stale, or 0 if no failover has made tokens stale.';

CREATE TABLE tower_fence.epochs (
    partition tower_fence.partition_number PRIMARY KEY,
    epoch tower_fence.epoch_number NOT NULL,
    leases_in tower_fence.epoch_number NOT NULL DEFAULT 0
);
COMMENT ON TABLE tower_fence.epochs IS
    'The last epoch that was begun in each partition. The tokens of epoch N begin at N * 1000000000.';
COMMENT ON COLUMN tower_fence.epochs.leases_in IS
    'The epoch in which acquire() grants leases, or 0 before the first grant in the partition.';

CREATE TABLE tower_fence.epoch_source (
    id text PRIMARY KEY,
    notices_failover boolean NOT NULL DEFAULT true
);
CREATE UNIQUE INDEX epoch_source_is_one_row ON tower_fence.epoch_source ((true));
COMMENT ON TABLE tower_fence.epoch_source IS
    'The identity of this source of epochs, in one row. A lease store refuses the epochs of another source.';
INSERT INTO tower_fence.epoch_source (id) VALUES (replace(gen_random_uuid()::text, '-', ''));

CREATE TABLE tower_fence.idempotency_keys (
    scope tower_fence.sha256_digest NOT NULL,
    key text COLLATE "C" NOT NULL,
    fingerprint tower_fence.sha256_digest NOT NULL,
    status tower_fence.http_status,
    headers bytea,
    body bytea,
    expires_at timestamptz NOT NULL,
    claimed_by xid8,
    PRIMARY KEY (scope, key)
);
CREATE INDEX idempotency_keys_expires_at ON tower_fence.idempotency_keys (expires_at);
COMMENT ON TABLE tower_fence.idempotency_keys IS
    'The response of each write under an idempotency key, stored in the transaction of that write.';
COMMENT ON COLUMN tower_fence.idempotency_keys.scope IS
    'SHA-256 of the scope of the key, which includes the principal.';
COMMENT ON COLUMN tower_fence.idempotency_keys.fingerprint IS 'SHA-256 of the request.';
COMMENT ON COLUMN tower_fence.idempotency_keys.status IS 'The HTTP status, or null until the response is stored.';
COMMENT ON COLUMN tower_fence.idempotency_keys.claimed_by IS
    'The transaction that claimed the key. Only this transaction can store the response.';

-- Returns null on a standby. The result begins with the version of the server, because an upgrade
-- restarts the timelines at 1. The function has no settings of its own, so that Postgres can inline
-- it into each admission.
CREATE FUNCTION tower_fence.current_history()
RETURNS text LANGUAGE sql AS $fence$
    SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN
        pg_catalog.left(pg_catalog.current_setting('server_version_num'), 2)
        || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8) END
$fence$;
COMMENT ON FUNCTION tower_fence.current_history IS
    'The major version and the timeline of the server. If this value changes, a failover has occurred.';

-- Without a timeline that changes whenever data is lost, the fence detects no failover, and may
-- admit a stale token after a failover. The operator must accept this risk explicitly.
DO $fence$
DECLARE
    state text := 'feature_not_supported';
    reason text;
BEGIN
    BEGIN
        PERFORM tower_fence.current_history();
    EXCEPTION WHEN OTHERS THEN
        state := SQLSTATE;
        reason := concat('no failover can be detected: ', SQLERRM);
    END;
    -- Aurora and Neon have replaced the storage of Postgres, and restore it without a new timeline.
    -- Aurora executes this function even though pg_proc does not contain it.
    BEGIN
        EXECUTE 'SELECT aurora_version()';
        reason := 'no failover can be detected: a restored Aurora cluster keeps its timeline';
    EXCEPTION WHEN OTHERS THEN
        NULL;
    END;
    IF current_setting('neon.timeline_id', true) IS NOT NULL THEN
        reason := 'no failover can be detected: a restored branch of Neon keeps its timeline';
    END IF;
    IF reason IS NULL THEN
        RETURN;
    ELSIF current_setting('tower_fence.failover_detection', true) IS DISTINCT FROM 'off' THEN
        RAISE EXCEPTION USING ERRCODE = state, MESSAGE = reason,
            HINT = 'Grant EXECUTE on pg_walfile_name if this privilege is missing. Otherwise migrate without failover '
                'detection, and call tower_fence.after_failover() after each promotion and each restore.';
    END IF;
    CREATE OR REPLACE FUNCTION tower_fence.current_history()
    RETURNS text LANGUAGE sql AS 'SELECT pg_catalog.text ''''';
END
$fence$;

INSERT INTO tower_fence.floors (partition, history, unchanged_histories)
SELECT number, tower_fence.current_history(), ARRAY[tower_fence.current_history()]
FROM generate_series(0, 255) AS number;

-- Refusals -------------------------------------------------------------------------------------

CREATE FUNCTION tower_fence.refuse_malformed(reason text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    RAISE SQLSTATE 'TF400' USING MESSAGE = reason,
        HINT = 'Pass the token, or the whole Fencing-Token field, and the resource name as the issuer returned them.';
END
$fence$;
COMMENT ON FUNCTION tower_fence.refuse_malformed IS 'Raises TF400.';

CREATE FUNCTION tower_fence.refuse_stale(resource text, token bigint, max_token bigint, by_floor boolean, used boolean)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    RAISE SQLSTATE 'TF412' USING
        MESSAGE = concat('token ', token, ' for ', resource, CASE
            WHEN by_floor THEN concat(' is not newer than ', max_token, ', the floor of its partition')
            WHEN used THEN ' was used already'
            WHEN token = max_token THEN ' was superseded or used already'
            ELSE concat(' is not newer than ', max_token) END),
        -- A hint cannot be null.
        HINT = CASE
            WHEN used THEN 'Renew the lease with a new token for another write, or admit the token as reusable.'
            WHEN by_floor THEN 'Renew the lease with a new token, and read the data again before the next write.'
            ELSE 'Acquire the lease again, and read the data again before the next write.' END,
        DETAIL = json_build_object(
            'resource', resource, 'presented_token', token, 'max_token', max_token,
            'used', used, 'by_floor', by_floor
        )::text;
END
$fence$;
COMMENT ON FUNCTION tower_fence.refuse_stale IS 'Raises TF412.';

CREATE FUNCTION tower_fence.refuse_incomplete(partition smallint)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF (refuse_incomplete.partition BETWEEN 0 AND 255) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING
            MESSAGE = concat('a partition must be a number from 0 to 255, not ',
                coalesce(refuse_incomplete.partition::text, 'null'));
    ELSIF row_security_active('tower_fence.floors') THEN
        RAISE insufficient_privilege USING
            MESSAGE = 'row-level security hides rows of the table floors from the fence',
            HINT = 'Disable row-level security on the tables of the fence.';
    END IF;
    RAISE object_not_in_prerequisite_state USING
        MESSAGE = concat('floors has no row for partition ', refuse_incomplete.partition,
            ': the tables of the fence were emptied, or restored in part'),
        HINT = 'Restore the whole database from a backup, and call tower_fence.after_failover().';
END
$fence$;
COMMENT ON FUNCTION tower_fence.refuse_incomplete IS
    'Raises the error for a partition that is out of range, or whose row in floors is missing or hidden.';

-- A token is an Integer of RFC 9651 that is at least 1.
CREATE FUNCTION tower_fence.check_token(token bigint)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    IF (token BETWEEN 1 AND 999999999999999) IS NOT TRUE THEN
        PERFORM tower_fence.refuse_malformed(concat(
            'a fencing token must be an integer from 1 to 999999999999999, not ', coalesce(token::text, 'null')
        ));
    END IF;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.check_token IS 'Raises TF400 unless the integer is a fencing token.';

CREATE FUNCTION tower_fence.check_resource(resource text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    bytes CONSTANT integer := octet_length(check_resource.resource);
BEGIN
    IF bytes IS NULL THEN
        PERFORM tower_fence.refuse_malformed('a resource name cannot be null');
    ELSIF bytes = 0 THEN
        PERFORM tower_fence.refuse_malformed('a resource name cannot be empty');
    ELSIF bytes > 255 THEN
        PERFORM tower_fence.refuse_malformed(concat('a resource name must have at most 255 bytes, not ', bytes));
    ELSIF check_resource.resource COLLATE "C" ~ E'[\\u0001-\\u001f\\u007f-\\u009f]' THEN
        PERFORM tower_fence.refuse_malformed('a resource name must not contain control characters');
    END IF;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.check_resource IS 'Raises TF400 unless the text is a resource name.';

-- There is no warning if another function calls the caller. In the simple query protocol, the
-- function raises the warning if the statement begins its transaction and is the only statement of
-- its message. In the extended query protocol, it raises the warning if the portal of the statement
-- begins the transaction. If the client parses the statement in the same batch, the function cannot
-- detect that the statement is outside of a transaction. Callers set the search_path, because a
-- setting here would cost more than the function itself.
CREATE FUNCTION tower_fence.warn_outside_transaction(name text)
RETURNS boolean LANGUAGE plpgsql AS $fence$
DECLARE
    context text;
BEGIN
    -- If a statement calls the caller, the context has three lines: this function, the call to it,
    -- and the caller.
    GET DIAGNOSTICS context = PG_CONTEXT;
    IF cardinality(string_to_array(context, E'\n')) > 3 THEN
        RETURN true;
    END IF;
    IF (CASE WHEN statement_timestamp() = transaction_timestamp()
        THEN position(';' IN rtrim(current_query(), E'; \t\r\n')) = 0
        ELSE EXISTS (SELECT FROM pg_cursors AS c WHERE c.name = '' AND c.creation_time = transaction_timestamp())
    END) THEN
        RAISE WARNING USING
            ERRCODE = 'no_active_sql_transaction',
            MESSAGE = concat(name, ' has no effect on later statements: it runs in a transaction of its own'),
            HINT = 'Call it in the transaction that writes: BEGIN, this call, the writes, COMMIT.';
    END IF;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.warn_outside_transaction IS
    'Warns if the calling statement runs in a transaction of its own.';

CREATE FUNCTION tower_fence.wait_for_disk()
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    -- remote_write and remote_apply also wait for the local disk.
    IF current_setting('synchronous_commit') IN ('off', 'local') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.wait_for_disk IS
    'Makes the COMMIT of this transaction wait for the disk, even if synchronous_commit is off or local in the '
    'session.';

-- Partitions, epochs and failovers -------------------------------------------------------------

-- Computes the CRC four bits at a time.
CREATE FUNCTION tower_fence.partition_of(resource text)
RETURNS smallint LANGUAGE plpgsql IMMUTABLE STRICT SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    remainders CONSTANT bigint[] := '{
        0, 498536548, 997073096, 651767980, 1994146192, 1802195444, 1303535960, 1342533948,
        3988292384, 4027552580, 3604390888, 3412177804, 2607071920, 2262029012, 2685067896, 3183342108
    }';
    name CONSTANT bytea := convert_to(resource, 'UTF8');
    crc bigint := 4294967295;
BEGIN
    FOR place IN 0 .. octet_length(name) - 1 LOOP
        crc := crc # get_byte(name, place);
        crc := (crc >> 4) # remainders[(crc & 15) + 1];
        crc := (crc >> 4) # remainders[(crc & 15) + 1];
    END LOOP;
    RETURN ~crc & 255;
END
$fence$;
COMMENT ON FUNCTION tower_fence.partition_of IS
    'The partition of a resource: the low byte of the CRC-32 (IEEE 802.3) of its name in UTF-8.';

-- Returns 1,000 for each step from one timeline to the next. Timelines that this database has not
-- seen also count. The part of the WAL that one failover loses is assumed to contain fewer than
-- 1,000 epochs. At most 100 steps are counted, because a restored dump may contain the timeline of
-- another cluster. A cluster is assumed to have fewer promotions between two uses of a partition. A
-- history begins with the version and the timeline (ten characters). On a distributed fence, the
-- system identifier of the server follows.
CREATE FUNCTION tower_fence.forgotten_epochs(before text, here text)
RETURNS bigint LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $fence$
    SELECT 1000 * CASE
        WHEN before = here THEN 0
        WHEN before ~ '^[0-9]{2}[0-9A-F]{8}' AND left(before, 2) = left(here, 2)
            THEN least(100, greatest(1, ('x' || substr(here, 3, 8))::bit(32)::bigint
                - ('x' || substr(before, 3, 8))::bit(32)::bigint))
        ELSE 1
    END
$fence$;
COMMENT ON FUNCTION tower_fence.forgotten_epochs IS
    'The number of epochs that failovers between two timelines may have lost, with a margin.';

CREATE FUNCTION tower_fence.move_up(partition smallint, forgotten bigint)
RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
#variable_conflict use_column
DECLARE
    epochs CONSTANT bigint := least(move_up.forgotten, 999999);
    stale bigint;
BEGIN
    -- If other partitions have epochs, a partition without epochs may have lost its first epoch.
    INSERT INTO tower_fence.epochs AS e (partition, epoch)
    SELECT move_up.partition, epochs WHERE EXISTS (SELECT FROM tower_fence.epochs AS o WHERE o.epoch > 0)
    ON CONFLICT (partition) DO UPDATE SET epoch = least(e.epoch + epochs, 999999)
    RETURNING e.epoch * 1000000000 + 999999999 INTO stale;
    UPDATE tower_fence.floors AS l SET
        floor = greatest(l.floor, stale),
        failover_floor = greatest(l.failover_floor, stale)
    WHERE l.partition = move_up.partition AND stale IS NOT NULL;
    RETURN stale;
END
$fence$;
COMMENT ON FUNCTION tower_fence.move_up IS
    'Makes all granted tokens of a partition stale, including tokens whose grants the database has lost, and returns '
    'the highest stale token. If no partition has an epoch, returns null and changes nothing, because the tokens '
    'belong to another issuer.';

-- If the tokens of a row are above all granted tokens, the resource has received a token of another
-- issuer or a forged token. The tokens of later grants exceed such a token by at most 1,000 for
-- each epoch that may be lost.
--
-- after_failover() calls this function for each row. Without settings of its own, the function can
-- be inlined. It needs no search_path, because its operators are qualified.
CREATE FUNCTION tower_fence.max_token_after(max_token bigint, announced bigint, failover_floor bigint, forgotten bigint)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $fence$
    SELECT CASE
        WHEN failover_floor OPERATOR(pg_catalog.=) 0 THEN max_token
        ELSE greatest(failover_floor, least(
            greatest(max_token, announced) OPERATOR(pg_catalog.+) (1000 OPERATOR(pg_catalog.*) forgotten),
            999999999999999
        ))
    END
$fence$;
COMMENT ON FUNCTION tower_fence.max_token_after IS
    'The max_token of a row after a failover that made all tokens up to failover_floor stale.';

-- With `enable_seqscan = off`, a scan that cannot be avoided has a high cost, which would start the
-- JIT compiler.
CREATE FUNCTION tower_fence.catch_up_partition(partition smallint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = on AS $fence$
DECLARE
    here CONSTANT text := tower_fence.current_history();
    before text;
    moved boolean := false;
BEGIN
    IF here IS NULL OR EXISTS (
        SELECT FROM tower_fence.floors AS l WHERE l.partition = catch_up_partition.partition AND l.history = here
    ) THEN
        RETURN false;
    END IF;
    SELECT l.history INTO before FROM tower_fence.floors AS l
    WHERE l.partition = catch_up_partition.partition FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM tower_fence.refuse_incomplete(catch_up_partition.partition);
    END IF;
    IF before = here THEN
        RETURN true;
    END IF;
    IF EXISTS (SELECT FROM tower_fence.epoch_source AS s WHERE s.notices_failover) THEN
        moved := tower_fence.move_up(
            catch_up_partition.partition, tower_fence.forgotten_epochs(before, here)
        ) IS NOT NULL;
        -- A probe is rolled back, so each probe would log the same line.
        IF moved AND current_setting('tower_fence.is_probe', true) IS DISTINCT FROM 'on' THEN
            RAISE LOG 'tower-fence: partition % has reached timeline %: earlier tokens are stale',
                catch_up_partition.partition, substr(here, 3, 8);
        END IF;
    END IF;
    UPDATE tower_fence.floors AS l SET
        history = here,
        unchanged_histories = CASE WHEN moved THEN ARRAY[here] ELSE l.unchanged_histories || here END
    WHERE l.partition = catch_up_partition.partition;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.catch_up_partition IS
    'Moves a partition to the timeline of this server, and returns whether the partition was on another timeline.';

-- The tokens of a row are compared with failover_floor, the highest token that could have been
-- granted when the failover was detected. The last token of the current epoch may be higher,
-- because epochs may have begun since the detection. The max_token of a row that was used after the
-- detection does not change.
CREATE FUNCTION tower_fence.catch_up(resource text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
DECLARE
    here CONSTANT text := tower_fence.current_history();
    own_partition smallint;
BEGIN
    IF here IS NULL OR EXISTS (
        SELECT FROM tower_fence.resources AS r WHERE r.resource = catch_up.resource AND r.history = here
    ) THEN
        RETURN false;
    END IF;
    -- after_failover() locks the table before the floors. Take the locks in the same order.
    LOCK TABLE tower_fence.resources IN ROW EXCLUSIVE MODE;
    own_partition := tower_fence.partition_of(catch_up.resource);
    IF NOT EXISTS (SELECT FROM tower_fence.resources AS r WHERE r.resource = catch_up.resource) THEN
        PERFORM tower_fence.check_resource(catch_up.resource);
        RETURN tower_fence.catch_up_partition(own_partition);
    END IF;
    PERFORM tower_fence.catch_up_partition(own_partition);
    UPDATE tower_fence.resources AS r SET
        max_token = CASE
            WHEN r.history = ANY (s.unchanged_histories) THEN r.max_token
            ELSE tower_fence.max_token_after(
                r.max_token, r.announced, s.failover_floor, tower_fence.forgotten_epochs(r.history, s.history)
            )
        END,
        history = s.history
    FROM (
        SELECT l.failover_floor, l.unchanged_histories, l.history
        FROM tower_fence.floors AS l WHERE l.partition = own_partition FOR SHARE
    ) AS s
    WHERE r.resource = catch_up.resource AND r.history <> s.history;
    PERFORM tower_fence.end_superseded(catch_up.resource);
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.catch_up IS
    'Moves a resource and its partition to the timeline of this server, and breaks the lease on the resource if its '
    'token has become stale. Returns whether the resource was on another timeline.';

-- Admission ------------------------------------------------------------------------------------

CREATE FUNCTION tower_fence.stale_up_to(
    resource text, OUT max_token bigint, OUT by_floor boolean, OUT announced boolean
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
BEGIN
    by_floor := false;
    SELECT r.max_token,
        r.announced > r.max_token OR (r.announced = r.max_token AND r.announced > 0 AND r.announced_lease IS NULL)
    INTO max_token, announced
    FROM tower_fence.resources AS r WHERE r.resource = stale_up_to.resource;
    IF NOT FOUND THEN
        by_floor := true;
        announced := false;
        SELECT l.floor INTO max_token FROM tower_fence.floors AS l
        WHERE l.partition = tower_fence.partition_of(stale_up_to.resource);
        IF NOT FOUND THEN
            PERFORM tower_fence.refuse_incomplete(tower_fence.partition_of(stale_up_to.resource));
        END IF;
    END IF;
END
$fence$;
COMMENT ON FUNCTION tower_fence.stale_up_to IS
    'Returns the highest stale token of a resource, which is max_token of its row or, without a row, the floor of its '
    'partition. Also returns whether a higher token was announced, or was used after the announcement of max_token. If '
    'so, max_token itself was not necessarily used.';

-- A transaction that inserts a row locks the floor FOR SHARE. Therefore the transaction waits for a
-- removal of idle rows, and reads the floor that the removal has set. On Citus, distribute()
-- replaces this function and the next one, but not their callers.
CREATE FUNCTION tower_fence.floor_of(resource text, partition smallint, here text)
RETURNS bigint LANGUAGE plpgsql AS $fence$
BEGIN
    RETURN (
        SELECT l.floor FROM tower_fence.floors AS l
        WHERE l.partition = floor_of.partition AND l.history = here FOR SHARE
    );
END
$fence$;
COMMENT ON FUNCTION tower_fence.floor_of IS
    'The highest stale token of a resource without a row, or null if its partition is not on the timeline of this '
    'server.';

CREATE FUNCTION tower_fence.catch_up_in_transaction(resource text)
RETURNS boolean LANGUAGE sql AS $fence$
    SELECT tower_fence.catch_up(catch_up_in_transaction.resource)
$fence$;
COMMENT ON FUNCTION tower_fence.catch_up_in_transaction IS
    'Calls catch_up() for a function that runs in the transaction that writes.';

-- At READ COMMITTED, each statement sees all transactions that were committed before the statement
-- began. After a wait for a row lock, Postgres evaluates the WHERE clause again, on the newest
-- version of the row. The row stays locked until the transaction ends.
--
-- After a reusable write of the token that follows the announced one, max_token is the announced
-- token, as after a single-use write of the announced token itself. Therefore a token above the
-- announced one also clears announced_lease, so that the announced lease cannot be renewed.
CREATE FUNCTION tower_fence.try_admit(
    resource text, token bigint, reusable boolean,
    OUT outcome text, OUT max_token bigint, OUT by_floor boolean, OUT announced boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := tower_fence.current_history();
    own_partition smallint;
    raised_to bigint;
    current_token bigint;
BEGIN
    -- For a valid token, this comparison costs less than a call to check_token().
    IF (try_admit.token BETWEEN 1 AND 999999999999999) IS NOT TRUE THEN
        PERFORM tower_fence.check_token(try_admit.token);
    END IF;
    raised_to := CASE WHEN try_admit.reusable THEN try_admit.token - 1 ELSE try_admit.token END;
    outcome := 'admitted';
    max_token := raised_to;
    by_floor := false;
    announced := false;
    UPDATE tower_fence.resources AS r
    SET max_token = raised_to, updated_at = CURRENT_TIMESTAMP, admitted_by = pg_current_xact_id(),
        announced_lease = CASE WHEN r.announced >= try_admit.token THEN r.announced_lease END
    WHERE r.resource = try_admit.resource AND r.max_token < try_admit.token AND r.history = here;
    IF FOUND THEN
        RETURN;
    END IF;
    -- Either the resource has no row, or its row has another timeline or a max_token that is not
    -- below the token.
    SELECT r.max_token INTO current_token FROM tower_fence.resources AS r WHERE r.resource = try_admit.resource;
    IF current_token IS NULL THEN
        PERFORM tower_fence.check_resource(try_admit.resource);
    END IF;
    IF current_token IS NULL OR current_token < try_admit.token THEN
        own_partition := tower_fence.partition_of(try_admit.resource);
        IF tower_fence.floor_of(try_admit.resource, own_partition, here) < try_admit.token THEN
            INSERT INTO tower_fence.resources AS r (resource, max_token, updated_at, partition, admitted_by, history)
            VALUES (try_admit.resource, raised_to, CURRENT_TIMESTAMP, own_partition, pg_current_xact_id(), here)
            ON CONFLICT (resource) DO UPDATE SET
                max_token = excluded.max_token, updated_at = excluded.updated_at, admitted_by = excluded.admitted_by,
                announced_lease = CASE WHEN r.announced >= try_admit.token THEN r.announced_lease END
                WHERE r.max_token < try_admit.token AND r.history = excluded.history;
            IF FOUND THEN
                RETURN;
            END IF;
        END IF;
    END IF;
    SELECT s.max_token, s.by_floor, s.announced INTO max_token, by_floor, announced
    FROM tower_fence.stale_up_to(try_admit.resource) AS s;
    -- If the token was refused but is not stale, the resource or its partition is on another
    -- timeline, or another transaction has removed the row in the meantime.
    outcome := CASE WHEN max_token >= try_admit.token THEN 'stale' ELSE 'behind' END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.try_admit IS
    'Admits a token in this transaction. Returns admitted, stale (with the highest stale token), or behind. If the '
    'outcome is behind, call catch_up() and retry.';

CREATE FUNCTION tower_fence.admit(resource text, token bigint, reusable boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    answer record;
BEGIN
    PERFORM tower_fence.warn_outside_transaction('admit');
    FOR attempt IN 1 .. 3 LOOP
        SELECT a.* INTO answer FROM tower_fence.try_admit(admit.resource, admit.token, admit.reusable) AS a;
        IF answer.outcome = 'admitted' THEN
            RETURN answer.max_token;
        ELSIF answer.outcome = 'stale' THEN
            PERFORM tower_fence.refuse_stale(
                admit.resource, admit.token, answer.max_token, answer.by_floor,
                NOT (coalesce(admit.reusable, false) OR answer.by_floor OR answer.announced)
                AND admit.token = answer.max_token
            );
        END IF;
        PERFORM tower_fence.catch_up_in_transaction(admit.resource);
    END LOOP;
    RAISE serialization_failure USING
        MESSAGE = concat('other transactions changed ', admit.resource, ' several times during the call'),
        HINT = 'Retry the transaction.';
END
$fence$;
COMMENT ON FUNCTION tower_fence.admit IS
    'Admits a token in the transaction that writes, and returns max_token, which is the token itself or, if the token '
    'is reusable, the number before it. Raises TF412 if the token is stale, TF400 if the token or the resource name is '
    'invalid, 40001 if other transactions change the row during the call, and 42501, 55000 or 57P03 if the fence '
    'cannot be used, for example because its tables were restored in part, or because a shard of a distributed fence '
    'has moved. The row of the resource stays locked until the transaction ends. A call outside of a transaction '
    'raises a WARNING, which also appears in the log of the server.';

-- This function implements the grammar of RFC 9651, as the crate does. An application that splits
-- the field itself, at semicolons or commas, may use the token of one resource for another
-- resource.
CREATE FUNCTION tower_fence.header_tokens(field text)
RETURNS TABLE (token bigint, resource text) LANGUAGE plpgsql IMMUTABLE
SET search_path = pg_catalog, pg_temp SET standard_conforming_strings = on AS $fence$
DECLARE
    string CONSTANT text := '"(?:[ !#-\[\]-~]|\\["\\])*"';
    byte_sequence CONSTANT text := ':(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}={0,2}|[A-Za-z0-9+/]{3}=?)?:';
    -- Percent-encoded UTF-8 bytes, without overlong forms or surrogates.
    tail CONSTANT text := '%[89ab][0-9a-f]';
    display_string CONSTANT text := concat(
        '%"(?:[ !#$&-~]|%[0-7][0-9a-f]|%(?:c[2-9a-f]|d[0-9a-f]|e0%[ab][0-9a-f]|ed%[89][0-9a-f]|e[1-9a-cef]', tail,
        '|f0%[9ab][0-9a-f]', tail, '|f[123]', tail, tail, '|f4%8[0-9a-f]', tail, ')', tail, ')*"'
    );
    value CONSTANT text := concat(
        string, '|', display_string, '|', byte_sequence,
        '|-?[0-9]{1,12}\.[0-9]{1,3}|@?-?[0-9]{1,15}|[?][01]|[A-Za-z*][!#$%&''*+.^_`|~0-9A-Za-z:/-]*'
    );
    parameter CONSTANT text := concat('; *([a-z*][a-z0-9_.*-]*)(?:=(', value, '))?');
    member CONSTANT text := concat(
        '^(-?[0-9]{1,15})((?:; *[a-z*][a-z0-9_.*-]*(?:=(?:', value, '))?)*)[ \t]*(?:,[ \t]*(.+))?$'
    );
    rest text := ltrim(header_tokens.field, ' ');
    part text[];
    item text[];
    names text[] := '{}';
BEGIN
    IF octet_length(header_tokens.field) > 65536 THEN
        PERFORM tower_fence.refuse_malformed('the field has more than 65536 bytes');
    END IF;
    WHILE rest <> '' LOOP
        -- The time of this loop grows with the square of the number of tokens.
        IF cardinality(names) >= 100 THEN
            PERFORM tower_fence.refuse_malformed('the field has more than 100 tokens');
        END IF;
        part := regexp_match(rest, member);
        IF part IS NULL THEN
            PERFORM tower_fence.refuse_malformed('the field is not a List of Integers');
        END IF;
        token := part[1]::bigint;
        PERFORM tower_fence.check_token(token);
        resource := NULL;
        -- If a parameter occurs more than once, its last value applies.
        FOR item IN
            SELECT DISTINCT ON (p.item[1]) p.item
            FROM regexp_matches(part[2], parameter, 'g') WITH ORDINALITY AS p (item, place)
            ORDER BY p.item[1], p.place DESC
        LOOP
            IF item[1] = 'resource' AND item[2] ~ '^"' THEN
                resource := regexp_replace(substr(item[2], 2, length(item[2]) - 2), '\\(.)', '\1', 'g');
            ELSIF item[1] = 'resource' AND item[2] ~ '^%' AND item[2] !~ '%00' THEN
                resource := convert_from(coalesce((
                    SELECT string_agg(
                        CASE WHEN left(p.part[1], 1) = '%' THEN decode(substr(p.part[1], 2), 'hex')
                            ELSE convert_to(p.part[1], 'UTF8') END,
                        ''::bytea ORDER BY p.place
                    )
                    FROM regexp_matches(substr(item[2], 3, length(item[2]) - 3), '%..|[^%]+', 'g')
                        WITH ORDINALITY AS p (part, place)
                ), ''), 'UTF8');
            ELSIF item[1] = 'resource'
                OR (item[1] = 'key' AND (item[2] ~ '^"[A-Za-z0-9._-]{1,64}"$') IS NOT TRUE)
                OR (item[1] = 'mac' AND (item[2] ~ '^:') IS NOT TRUE)
            THEN
                PERFORM tower_fence.refuse_malformed(concat('the parameter `', item[1], '` has an invalid value'));
            END IF;
        END LOOP;
        IF resource IS NOT NULL THEN
            PERFORM tower_fence.check_resource(resource);
            IF resource = ANY (names) THEN
                PERFORM tower_fence.refuse_malformed(concat('the field names ', resource, ' twice'));
            END IF;
        END IF;
        names := names || resource;
        RETURN NEXT;
        rest := part[3];
    END LOOP;
END
$fence$;
COMMENT ON FUNCTION tower_fence.header_tokens IS
    'The tokens of a Fencing-Token field, each with the resource that it names. Raises TF400 for a malformed '
    'field. Signatures are not verified.';

CREATE FUNCTION tower_fence.admit_header(field text, resource text, reusable boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    found_tokens record;
    own_token bigint;
BEGIN
    PERFORM tower_fence.warn_outside_transaction('admit_header');
    PERFORM tower_fence.check_resource(resource);
    SELECT count(*) AS number, count(h.resource) AS named, max(h.token) FILTER (
        WHERE h.resource IS NULL OR h.resource = admit_header.resource
    ) AS own INTO found_tokens FROM tower_fence.header_tokens(field) AS h;
    IF found_tokens.number = 0 THEN
        PERFORM tower_fence.refuse_malformed('the field has no fencing token');
    ELSIF found_tokens.number > 1 AND found_tokens.named < found_tokens.number THEN
        PERFORM tower_fence.refuse_malformed('a field with several tokens must name the resource of each');
    ELSIF found_tokens.own IS NULL THEN
        RAISE SQLSTATE 'TF403' USING
            MESSAGE = concat('the field has no token for ', resource),
            HINT = 'Send the token that was granted for this resource.',
            DETAIL = json_build_object('resource', resource)::text;
    END IF;
    -- Citus delegates a call only if the call is in FROM and its arguments are variables.
    own_token := found_tokens.own;
    SELECT a.max_token INTO own_token FROM tower_fence.admit(resource, own_token, reusable) AS a (max_token);
    RETURN own_token;
END
$fence$;
COMMENT ON FUNCTION tower_fence.admit_header IS
    'Like admit(), with the unchanged value of the Fencing-Token field. If the request has several field lines, join '
    'them with commas. Raises the errors of admit(), TF400 if the field is malformed or has no token, and TF403 if all '
    'its tokens are for other resources. For a field with several tokens, call the function once for each resource of '
    'the request. Each call ignores the tokens of the other resources.';

-- Each transaction locks the key before the resource. The setting lock_timeout at the time of the
-- call limits the wait for the key. The argument lock_timeout limits the wait for the resource. If
-- `early` is true, the transaction began before its request. Such a transaction does not admit the
-- token if it began before the last write to the resource, so that now() never decreases from one
-- write to the next.
CREATE FUNCTION tower_fence.admit_once(
    scope bytea, key text, fingerprint bytea, ttl_ms bigint, lock_timeout text, early boolean,
    resource text, token bigint, reusable boolean,
    OUT outcome text, OUT max_token bigint, OUT by_floor boolean, OUT announced boolean, OUT role text,
    OUT found_fingerprint bytea, OUT status smallint, OUT headers bytea, OUT body bytea
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
#variable_conflict use_column
BEGIN
    IF (octet_length(admit_once.scope) = 32 AND octet_length(admit_once.fingerprint) = 32
        AND octet_length(admit_once.key) BETWEEN 1 AND 255 AND admit_once.ttl_ms BETWEEN 1 AND 3155760000000
    ) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'scope and fingerprint must have 32 bytes, key must have 1 to 255 bytes, and ttl_ms must be '
                'from 1 to 3155760000000';
    END IF;
    INSERT INTO tower_fence.idempotency_keys AS k (scope, key, fingerprint, expires_at, claimed_by) VALUES (
        admit_once.scope, admit_once.key, admit_once.fingerprint, now() + admit_once.ttl_ms * interval '1 ms',
        pg_current_xact_id()
    )
    ON CONFLICT (scope, key) DO UPDATE SET
        fingerprint = excluded.fingerprint, expires_at = excluded.expires_at, claimed_by = excluded.claimed_by,
        status = NULL, headers = NULL, body = NULL
        WHERE k.expires_at <= now();
    IF NOT FOUND THEN
        outcome := 'found';
        SELECT k.fingerprint, k.status, k.headers, k.body INTO found_fingerprint, status, headers, body
        FROM tower_fence.idempotency_keys AS k
        WHERE k.scope = admit_once.scope AND k.key = admit_once.key AND k.expires_at > now();
        RETURN;
    END IF;
    PERFORM set_config('lock_timeout', admit_once.lock_timeout, true);
    role := current_setting('role');
    -- On a distributed fence, the caller admits the token in another statement. An admission here
    -- would write the row as the owner of this function, and Citus refuses a transaction in which
    -- two roles write to one shard.
    IF admit_once.resource IS NULL AND tower_fence.is_distributed() THEN
        outcome := 'claimed';
        RETURN;
    END IF;
    -- This statement repeats the first statement of try_admit(), because a call to that function
    -- costs more than the statement. If the token ends an announcement, try_admit() admits it.
    outcome := 'admitted';
    max_token := CASE WHEN admit_once.reusable THEN admit_once.token - 1 ELSE admit_once.token END;
    by_floor := false;
    announced := false;
    UPDATE tower_fence.resources AS r
    SET max_token = admit_once.max_token, updated_at = CURRENT_TIMESTAMP, admitted_by = pg_current_xact_id()
    WHERE r.resource = admit_once.resource AND r.max_token < admit_once.token
        AND admit_once.token <= 999999999999999 AND r.history = tower_fence.current_history()
        AND (r.announced >= admit_once.token OR r.announced_lease IS NULL)
        AND (NOT admit_once.early OR r.updated_at <= CURRENT_TIMESTAMP);
    IF FOUND THEN
        RETURN;
    ELSIF admit_once.early THEN
        PERFORM tower_fence.check_token(admit_once.token);
        PERFORM tower_fence.check_resource(admit_once.resource);
        outcome := 'early';
        RETURN;
    END IF;
    SELECT a.outcome, a.max_token, a.by_floor, a.announced INTO outcome, max_token, by_floor, announced
    FROM tower_fence.try_admit(admit_once.resource, admit_once.token, admit_once.reusable) AS a;
END
$fence$;
COMMENT ON FUNCTION tower_fence.admit_once IS
    'Claims an idempotency key in this transaction and admits a token, with the outcomes of try_admit(). If the key '
    'already has a record, returns found, with that record (nulls if it has no response). If the transaction is early '
    'and does not admit the token, returns early. In that case, retry in another transaction. On a distributed fence, '
    'pass null as the resource: the call then returns claimed and admits nothing.';

CREATE FUNCTION tower_fence.store_response(scope bytea, key text, status smallint, headers bytea, body bytea)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
BEGIN
    UPDATE tower_fence.idempotency_keys AS k
    SET status = store_response.status, headers = store_response.headers, body = store_response.body
    WHERE k.scope = store_response.scope AND k.key = store_response.key AND k.status IS NULL
        AND k.claimed_by = pg_current_xact_id_if_assigned();
    RETURN FOUND;
END
$fence$;
COMMENT ON FUNCTION tower_fence.store_response IS
    'Stores the response of a write under the key that its transaction has claimed. Returns false if this '
    'transaction has not claimed the key.';

CREATE FUNCTION tower_fence.find_response(
    scope bytea, key text, OUT fingerprint bytea, OUT status smallint, OUT headers bytea, OUT body bytea
)
RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
    SELECT k.fingerprint, k.status, k.headers, k.body FROM tower_fence.idempotency_keys AS k
    WHERE k.scope = find_response.scope AND k.key = find_response.key AND k.expires_at > now()
$fence$;
COMMENT ON FUNCTION tower_fence.find_response IS
    'Returns the record of an idempotency key, unless the record has expired.';

-- The COMMIT of a raise waits for the disk, because no older token may be admitted even after a
-- crash.
CREATE FUNCTION tower_fence.try_raise(
    resource text, token bigint, OUT outcome text, OUT max_token bigint, OUT by_floor boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := tower_fence.current_history();
    own_partition smallint;
    raised_to bigint;
BEGIN
    PERFORM tower_fence.check_token(try_raise.token);
    raised_to := try_raise.token - 1;
    PERFORM tower_fence.wait_for_disk();
    outcome := 'raised';
    max_token := raised_to;
    by_floor := false;
    -- updated_at may be later than the beginning of this transaction, and must not decrease. If
    -- max_token is high enough already, the announced lease may still have to be cleared.
    UPDATE tower_fence.resources AS r
    SET max_token = raised_to, updated_at = greatest(r.updated_at, CURRENT_TIMESTAMP),
        announced_lease = CASE WHEN r.announced >= try_raise.token THEN r.announced_lease END
    WHERE r.resource = try_raise.resource AND r.history = here AND (r.max_token < raised_to
        OR (r.max_token = raised_to AND r.announced <= raised_to AND r.announced_lease IS NOT NULL));
    IF FOUND THEN
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM tower_fence.resources AS r WHERE r.resource = try_raise.resource) THEN
        -- The fence is already raised, but that raise may not be on the disk yet, because another
        -- session may have committed it with synchronous_commit = off. The COMMIT of a transaction
        -- without WAL records does not wait. Locking the row writes a WAL record, so the COMMIT
        -- waits. If another transaction has removed the row or lowered its max_token in the
        -- meantime, no row is locked. In this case, the outcome is 'behind' unless the token is
        -- stale, and the caller retries.
        SELECT r.max_token INTO max_token FROM tower_fence.resources AS r
        WHERE r.resource = try_raise.resource AND r.max_token >= raised_to AND r.history = here FOR KEY SHARE;
        IF FOUND THEN
            outcome := CASE WHEN max_token >= try_raise.token THEN 'stale' ELSE 'raised' END;
            RETURN;
        END IF;
    ELSE
        PERFORM tower_fence.check_resource(try_raise.resource);
        own_partition := tower_fence.partition_of(try_raise.resource);
        IF tower_fence.floor_of(try_raise.resource, own_partition, here) < try_raise.token THEN
            INSERT INTO tower_fence.resources AS r (resource, max_token, updated_at, partition, history)
            VALUES (try_raise.resource, raised_to, CURRENT_TIMESTAMP, own_partition, here)
            ON CONFLICT (resource) DO UPDATE
                SET max_token = excluded.max_token, updated_at = greatest(r.updated_at, excluded.updated_at),
                    announced_lease = CASE WHEN r.announced >= try_raise.token THEN r.announced_lease END
                WHERE r.max_token < raised_to AND r.history = excluded.history;
            IF FOUND THEN
                RETURN;
            END IF;
        END IF;
    END IF;
    SELECT s.max_token, s.by_floor INTO max_token, by_floor FROM tower_fence.stale_up_to(try_raise.resource) AS s;
    outcome := CASE WHEN max_token >= try_raise.token THEN 'stale' ELSE 'behind' END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.try_raise IS
    'Makes all tokens below the given token stale. Returns raised, stale (if the given token is stale), or behind. If '
    'the outcome is behind, call catch_up() and retry.';

CREATE FUNCTION tower_fence.raise(resource text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    answer record;
BEGIN
    FOR attempt IN 1 .. 3 LOOP
        SELECT a.* INTO answer FROM tower_fence.try_raise(resource, token) AS a;
        IF answer.outcome = 'raised' THEN
            RETURN answer.max_token;
        ELSIF answer.outcome = 'stale' THEN
            PERFORM tower_fence.refuse_stale(resource, token, answer.max_token, answer.by_floor, false);
        END IF;
        PERFORM tower_fence.catch_up_in_transaction(resource);
    END LOOP;
    RAISE serialization_failure USING
        MESSAGE = concat('other transactions changed ', resource, ' several times during the call'),
        HINT = 'Retry the transaction.';
END
$fence$;
COMMENT ON FUNCTION tower_fence.raise IS
    'Makes all tokens below the given token stale, without a write, and returns max_token. Raises TF412 if the given '
    'token is stale, and the other errors of admit(). At REPEATABLE READ or SERIALIZABLE, raises 40001 if another '
    'transaction has changed the row.';

CREATE FUNCTION tower_fence.max_token(resource text)
RETURNS bigint LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    PERFORM tower_fence.check_resource(max_token.resource);
    RETURN (
        SELECT CASE WHEN s.max_token > 0 OR NOT s.by_floor THEN s.max_token END
        FROM tower_fence.stale_up_to(max_token.resource) AS s
    );
END
$fence$;
COMMENT ON FUNCTION tower_fence.max_token IS
    'The column max_token of the row of a resource. Without a row, the floor of its partition, or null if it is 0.';

-- Grants and epochs ----------------------------------------------------------------------------

CREATE FUNCTION tower_fence.announce(
    resource text, token bigint, lease bytea, renews boolean DEFAULT false,
    OUT outcome text, OUT highest bigint, OUT was_last boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := tower_fence.current_history();
    -- The table stores this hash instead of the digest, because lease_end() releases a lease by its
    -- digest, and other roles may read the table.
    lease_hash CONSTANT bytea := sha256(announce.lease);
    own_partition smallint;
    seen record;
BEGIN
    PERFORM tower_fence.check_token(announce.token);
    IF announce.lease IS NULL OR announce.renews IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'lease and renews must not be null';
    END IF;
    PERFORM tower_fence.wait_for_disk();
    outcome := 'announced';
    was_last := false;
    -- A renewal whose announcement is already in the row must not wait for a write in progress,
    -- because the holder's own transaction may have locked the row for longer than the TTL. At a
    -- stricter isolation level, and on a standby that lags, a read does not show that a later grant
    -- is announced.
    IF announce.renews AND current_setting('transaction_isolation') NOT IN ('repeatable read', 'serializable')
        AND NOT pg_is_in_recovery()
        AND EXISTS (
            SELECT FROM tower_fence.resources AS r
            WHERE r.resource = announce.resource AND r.max_token < announce.token
                AND r.announced = announce.token AND r.announced_lease = lease_hash AND r.history = here
        ) THEN
        RETURN;
    END IF;
    UPDATE tower_fence.resources AS r SET
        max_token = greatest(r.max_token, announce.token - 1),
        announced = announce.token,
        announced_lease = lease_hash,
        updated_at = greatest(r.updated_at, CURRENT_TIMESTAMP)
    WHERE r.resource = announce.resource AND r.max_token < announce.token
        AND (r.announced < announce.token OR (r.announced = announce.token AND r.announced_lease = lease_hash))
        -- A renewed token may be the highest because other resources share the counter. Since its
        -- holder has read, another lease may have been granted, or another token used.
        AND (NOT announce.renews OR r.announced = 0 OR (r.announced_lease = lease_hash AND r.max_token <= r.announced))
        AND r.history = here;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT greatest(r.max_token, r.announced) AS highest,
        r.announced = announce.token AND r.announced_lease IS NOT DISTINCT FROM lease_hash AS was_last,
        announce.renews AND r.announced > 0 AND r.history = here
            AND (r.announced_lease IS DISTINCT FROM lease_hash OR r.max_token > r.announced) AS is_lost,
        r.history <> here AS is_behind INTO seen
    FROM tower_fence.resources AS r WHERE r.resource = announce.resource;
    IF FOUND THEN
        highest := seen.highest;
        was_last := seen.was_last;
    ELSE
        own_partition := tower_fence.partition_of(announce.resource);
        IF tower_fence.floor_of(announce.resource, own_partition, here) < announce.token THEN
            INSERT INTO tower_fence.resources
                (resource, max_token, announced, announced_lease, updated_at, partition, history)
            VALUES (announce.resource, announce.token - 1, announce.token, lease_hash, CURRENT_TIMESTAMP,
                own_partition, here)
            ON CONFLICT (resource) DO NOTHING;
            IF FOUND THEN
                RETURN;
            END IF;
        END IF;
        SELECT s.max_token INTO highest FROM tower_fence.stale_up_to(announce.resource) AS s;
    END IF;
    -- The outcome is behind for the reasons in try_admit(), or because another transaction has
    -- inserted the row in the meantime.
    outcome := CASE
        WHEN seen.is_behind IS NOT TRUE AND (highest >= announce.token OR seen.is_lost) THEN 'superseded'
        ELSE 'behind' END;
END
$fence$;
COMMENT ON FUNCTION tower_fence.announce IS
    'Records a grant or a renewal and makes all tokens below its token stale. Returns announced, superseded (with the '
    'highest token that was used or announced, and whether this grant was the last announcement), or behind. A renewal '
    'is also superseded if the last announcement was that of another lease, or if a higher token has been used since. '
    'At READ COMMITTED, a renewal that repeats the last announcement changes nothing and waits for no lock. If the '
    'outcome is behind, call catch_up() and retry.';

CREATE FUNCTION tower_fence.next_epoch(partition smallint, at_least bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
#variable_conflict use_column
DECLARE
    begun bigint;
BEGIN
    IF next_epoch.at_least IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'at_least must not be null';
    END IF;
    PERFORM tower_fence.wait_for_disk();
    PERFORM tower_fence.catch_up_partition(next_epoch.partition);
    INSERT INTO tower_fence.epochs AS e (partition, epoch)
    SELECT next_epoch.partition, greatest(next_epoch.at_least, 1) WHERE next_epoch.at_least <= 999999
    ON CONFLICT (partition) DO UPDATE SET epoch = greatest(e.epoch + 1, excluded.epoch)
    WHERE e.epoch < 999999
    RETURNING e.epoch INTO begun;
    -- If no epoch is left, return an epoch above the range, which the caller refuses.
    RETURN coalesce(begun, 1000000);
END
$fence$;
COMMENT ON FUNCTION tower_fence.next_epoch IS
    'Begins the next epoch of a partition, or the epoch at_least if it is higher, and returns the new epoch. Returns '
    '1000000 if no epoch is left.';

CREATE FUNCTION tower_fence.report_epoch(partition smallint, seen bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
#variable_conflict use_column
DECLARE
    floor bigint;
BEGIN
    IF report_epoch.seen IS NULL THEN
        RAISE null_value_not_allowed USING MESSAGE = 'seen must not be null';
    ELSIF (report_epoch.partition BETWEEN 0 AND 255) IS NOT TRUE THEN
        PERFORM tower_fence.refuse_incomplete(report_epoch.partition);
    ELSIF report_epoch.seen > 999999 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = concat('an epoch must be a number from 1 to 999999, not ', report_epoch.seen);
    END IF;
    PERFORM tower_fence.wait_for_disk();
    -- Lock the row of `floors` before the row of `epochs`, as a catch-up does.
    PERFORM FROM tower_fence.floors AS l
    WHERE l.partition = report_epoch.partition AND l.history IS DISTINCT FROM tower_fence.current_history() FOR UPDATE;
    INSERT INTO tower_fence.epochs AS e (partition, epoch)
    SELECT report_epoch.partition, report_epoch.seen WHERE report_epoch.seen > 0
    ON CONFLICT (partition) DO UPDATE SET epoch = excluded.epoch WHERE e.epoch < excluded.epoch;
    PERFORM tower_fence.catch_up_partition(report_epoch.partition);
    SELECT l.floor INTO floor FROM tower_fence.floors AS l WHERE l.partition = report_epoch.partition;
    IF NOT FOUND THEN
        PERFORM tower_fence.refuse_incomplete(report_epoch.partition);
    END IF;
    RETURN floor;
END
$fence$;
COMMENT ON FUNCTION tower_fence.report_epoch IS
    'Records an epoch that an issuer has seen, in case the database has lost the epoch, and returns the floor of the '
    'partition.';

-- For operators --------------------------------------------------------------------------------

-- This function uses the search_path of its callers, because a setting of its own would cost more
-- than its work.
CREATE FUNCTION tower_fence.require_current_rows(name text)
RETURNS boolean LANGUAGE plpgsql AS $fence$
BEGIN
    -- Postgres implements READ UNCOMMITTED as READ COMMITTED.
    IF current_setting('transaction_isolation') IN ('repeatable read', 'serializable') THEN
        RAISE invalid_transaction_state USING
            MESSAGE = concat('call ', name, ' at READ COMMITTED: at a stricter isolation level, rows that were inserted '
                'after the snapshot are not visible');
    ELSIF pg_is_in_recovery() THEN
        RAISE read_only_sql_transaction USING
            MESSAGE = concat('call ', name, ' on the primary: a standby may lack rows that were inserted recently');
    END IF;
    RETURN true;
END
$fence$;
COMMENT ON FUNCTION tower_fence.require_current_rows IS
    'Raises 25000 if the transaction has a stricter isolation level than READ COMMITTED, and 25006 on a standby.';

CREATE FUNCTION tower_fence.refuse_hidden_row(resource text)
RETURNS boolean LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $fence$
BEGIN
    RAISE insufficient_privilege USING
        MESSAGE = concat('the row of ', resource, ' can be neither inserted nor locked, for example because of '
            'row-level security'),
        HINT = 'Disable row-level security on the tables of the fence.';
END
$fence$;
COMMENT ON FUNCTION tower_fence.refuse_hidden_row IS 'Raises 42501 for a row that can be neither inserted nor locked.';

CREATE FUNCTION tower_fence.reset(resource text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
#variable_conflict use_column
DECLARE
    own_partition CONSTANT smallint := tower_fence.partition_of(reset.resource);
    announced bigint;
    own_history text;
    granted bigint;
    last_token bigint;
    has_row boolean;
    before bigint;
BEGIN
    PERFORM tower_fence.require_current_rows('reset');
    PERFORM tower_fence.check_token(reset.token);
    PERFORM tower_fence.check_resource(reset.resource);
    PERFORM tower_fence.catch_up(reset.resource);
    FOR attempt IN 1 .. 10 LOOP
        SELECT r.announced, r.max_token INTO announced, before FROM tower_fence.resources AS r
        WHERE r.resource = reset.resource FOR UPDATE;
        has_row := FOUND;
        -- Ignore an announced grant of the highest possible token. The token that this reset
        -- removes may have caused that grant, and only a reset can make the resource usable again.
        granted := greatest(
            (SELECT e.epoch * 1000000000 FROM tower_fence.epochs AS e WHERE e.partition = own_partition),
            nullif(announced, 999999999999999), 0
        );
        -- The removal of a row removes its announced grant as well. The row is the token counter of
        -- acquire(), so only the floor still shows the tokens that acquire() has granted.
        IF NOT has_row OR announced IN (0, 999999999999999) THEN
            IF NOT has_row AND tower_fence.is_distributed() THEN
                SELECT s.history INTO own_history FROM tower_fence.shards AS s WHERE s.shard =
                    get_shard_id_for_distribution_column('tower_fence.resources'::regclass, reset.resource);
            ELSIF NOT has_row THEN
                -- The lock prevents a removal of idle rows from raising the floor until the
                -- transaction ends.
                SELECT l.history INTO own_history FROM tower_fence.floors AS l
                WHERE l.partition = own_partition FOR SHARE;
            END IF;
            last_token := (
                SELECT e.epoch * 1000000000 + 999999999 FROM tower_fence.epochs AS e
                WHERE e.partition = own_partition AND e.leases_in > 0
            );
            IF last_token IS NOT NULL THEN
                granted := greatest(granted, least(last_token, (
                    SELECT l.floor FROM tower_fence.floors AS l WHERE l.partition = own_partition
                )));
            END IF;
        END IF;
        IF granted > reset.token THEN
            RETURN granted;
        ELSIF has_row THEN
            UPDATE tower_fence.resources AS r SET
                max_token = reset.token,
                announced_lease = CASE WHEN r.announced > reset.token THEN NULL ELSE r.announced_lease END,
                announced = least(r.announced, reset.token)
            WHERE r.resource = reset.resource;
        ELSIF EXISTS (SELECT FROM tower_fence.floors AS l WHERE l.partition = own_partition AND l.floor > reset.token) THEN
            -- The new row takes precedence over the floor, which blocks the resource.
            INSERT INTO tower_fence.resources AS r (resource, max_token, updated_at, partition, history)
            VALUES (reset.resource, reset.token, CURRENT_TIMESTAMP, own_partition, own_history)
            ON CONFLICT (resource) DO NOTHING;
            -- If another transaction has inserted the row, the row may contain an announced grant,
            -- so read it.
            CONTINUE WHEN NOT FOUND;
        ELSE
            RETURN granted;
        END IF;
        RAISE LOG USING MESSAGE = concat(
            'tower-fence: ', session_user, ' resets ', reset.resource, ' to ', reset.token,
            ', before: ', coalesce(before::text, 'no row')
        );
        RETURN granted;
    END LOOP;
    PERFORM tower_fence.refuse_hidden_row(reset.resource);
END
$fence$;
COMMENT ON FUNCTION tower_fence.reset IS
    'Sets max_token of a resource to the given token, which may be below the current max_token. Returns the lowest '
    'token to which max_token may be reset. If the given token is below that token, nothing is changed. Before the '
    'call, break the lease on the resource, whose holder may have read before the writes of the removed token, and make '
    'sure that no request can still write with a previously granted token above the given token, because such a token '
    'is admitted again.';

-- Also moves the epochs up for each promotion after which the partition has not caught up yet. A
-- promotion moves the epochs up further than a call to this function does, because the promoted
-- server may have lost the effect of such a call.
--
-- One UPDATE changes the rows of all partitions. The rows of a partition are spread over the whole
-- table, so an UPDATE for each partition would visit each page of the table many times.
CREATE FUNCTION tower_fence.after_failover(calls bigint DEFAULT 1)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s'
AS $fence$
DECLARE
    here CONSTANT text := tower_fence.current_history();
    before text;
    -- The highest stale token of each partition, or 0 if no partition has an epoch.
    stale bigint[] := array_fill(0::bigint, ARRAY[256]);
BEGIN
    PERFORM tower_fence.require_current_rows('after_failover');
    IF (calls BETWEEN 1 AND 1999) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING
            MESSAGE = concat('calls must be a number from 1 to 1999, not ', coalesce(calls::text, 'null'));
    END IF;
    RAISE LOG USING MESSAGE = concat('tower-fence: ', session_user, ' calls after_failover(', calls, ')');
    IF tower_fence.is_distributed() THEN
        RETURN tower_fence.catch_up_workers(calls);
    END IF;
    -- Before this transaction locks a floor or a row, wait for the open transactions that write to
    -- resources. Such a transaction may write to further resources, and may then need to lock their
    -- floors. The lock also conflicts with VACUUM, ANALYZE and CREATE INDEX CONCURRENTLY. All other
    -- writes wait for this lock, so lock_timeout limits the wait.
    LOCK TABLE tower_fence.resources IN EXCLUSIVE MODE;
    PERFORM tower_fence.wait_for_disk();
    FOR number IN 0 .. 255 LOOP
        SELECT l.history INTO before FROM tower_fence.floors AS l WHERE l.partition = number FOR UPDATE;
        IF NOT FOUND THEN
            PERFORM tower_fence.refuse_incomplete(number::smallint);
        END IF;
        stale[number + 1] := coalesce(
            tower_fence.move_up(number::smallint, tower_fence.forgotten_epochs(before, here) + 500 * calls), 0
        );
    END LOOP;
    UPDATE tower_fence.floors AS l SET history = here, unchanged_histories = ARRAY[here];
    UPDATE tower_fence.resources AS r SET
        max_token = tower_fence.max_token_after(r.max_token, r.announced, stale[r.partition + 1], s.forgotten),
        history = here,
        -- In a restored database, a new transaction may have the id of an earlier transaction.
        admitted_by = NULL
    FROM (
        SELECT o.history, tower_fence.forgotten_epochs(o.history, here) + 500 * calls AS forgotten
        FROM tower_fence.resources AS o GROUP BY o.history
    ) AS s
    WHERE r.history = s.history;
    PERFORM tower_fence.end_superseded(l.resource) FROM tower_fence.leases AS l
    WHERE l.expires_at + l.lock_delay > clock_timestamp();
    RETURN stale[1] > 0;
END
$fence$;
COMMENT ON FUNCTION tower_fence.after_failover IS
    'Makes all tokens that were granted in the epochs of this database stale, including tokens whose grants the '
    'database has lost, and breaks their leases. Operators call this function if the database may have lost confirmed '
    'writes without a change of its timeline, for example because a dump was restored. Call it before any client '
    'writes. With an argument, the call has the effect of this number of calls. If no partition has an epoch, returns '
    'false, and all tokens stay valid. The call waits up to 10 s for the transactions that write to the table resources, '
    'and for a VACUUM, ANALYZE or CREATE INDEX CONCURRENTLY of that table. It rewrites all rows of the table. Other writes '
    'wait meanwhile. If the call raises 40P01 (deadlock_detected) or 55P03 (lock_not_available), nothing was changed. In this '
    'case, retry the call.';

CREATE FUNCTION tower_fence.notice_failover(enabled boolean)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '10s'
AS $fence$
BEGIN
    PERFORM tower_fence.wait_for_disk();
    PERFORM FROM tower_fence.epoch_source FOR UPDATE;
    PERFORM tower_fence.catch_up_partition(number::smallint) FROM generate_series(0, 255) AS number;
    PERFORM tower_fence.catch_up_workers(0) WHERE tower_fence.is_distributed();
    IF notice_failover.enabled IS NOT NULL THEN
        UPDATE tower_fence.epoch_source AS s SET notices_failover = notice_failover.enabled;
        RAISE LOG USING MESSAGE = concat(
            'tower-fence: ', session_user, ' calls notice_failover(', notice_failover.enabled::text, ')'
        );
    END IF;
    RETURN (SELECT s.notices_failover FROM tower_fence.epoch_source AS s);
END
$fence$;
COMMENT ON FUNCTION tower_fence.notice_failover IS
    'Moves all partitions to the timeline of this server, and the rows of a distributed fence to the timelines of the '
    'workers. The current setting applies to this step. Then sets whether a changed timeline makes tokens stale '
    '(default: true), and returns the setting. If the argument is null, the setting does not change. The call waits up '
    'to 10 s for each row that another transaction has locked. If it raises 40P01 (deadlock_detected) or 55P03 '
    '(lock_not_available), nothing was changed.';

-- A removal raises the floor to the token of the removed row, because for a resource without a row,
-- every token up to the floor is stale. Therefore a row is kept if its token is not below `held`,
-- the lowest token of a held lease. A row is also kept if its token is above `granted`, the highest
-- token known to have been granted (default: the last token of the last epoch). Otherwise a forged
-- token could block a whole partition. If the last lease on the resource in this database expired
-- or was released long enough ago, the lease is removed together with the row, and with requests in
-- its queue whose issuer has ended. If the resource has a more recent lease, or another request in
-- its queue, the row is kept.
--
-- The table and the floor are locked before the rows. The function waits at most 50 ms for each of
-- these locks, which is shorter than deadlock_timeout.
CREATE FUNCTION tower_fence.remove_idle_of(
    partition smallint, older_than interval, max_rows integer, granted bigint, held bigint
)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $fence$
DECLARE
    idle_since CONSTANT timestamptz := CURRENT_TIMESTAMP - older_than;
    -- The last token of the last epoch. Tokens below the first epoch belong to other issuers, and
    -- count as granted.
    last_token CONSTANT bigint := (
        SELECT 999999999 + 1000000000 * coalesce(max(e.epoch), 0) FROM tower_fence.epochs AS e
        WHERE e.partition = remove_idle_of.partition
    );
    below bigint;
    own_floor tower_fence.floors;
    idle text[];
    removed integer;
    stale bigint;
    stale_by_lease bigint;
BEGIN
    IF tower_fence.is_distributed() THEN
        -- If removals could raise a floor, the first write to each resource would have to lock the
        -- floor FOR SHARE. On the rows of a reference table, such locks make writers deadlock.
        RAISE feature_not_supported USING
            MESSAGE = 'remove_idle is not possible on a distributed fence: its floors would be locked on each worker by '
                'each first write, which deadlocks';
    ELSIF (idle_since <= CURRENT_TIMESTAMP AND max_rows > 0) IS NOT TRUE THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'older_than must not be negative, and max_rows must be at least 1';
    END IF;
    SELECT * INTO own_floor FROM tower_fence.floors AS l WHERE l.partition = remove_idle_of.partition;
    IF NOT FOUND THEN
        PERFORM tower_fence.refuse_incomplete(remove_idle_of.partition);
    END IF;
    granted := CASE
        WHEN own_floor.history = tower_fence.current_history()
            THEN coalesce(granted, last_token)
        ELSE least(granted, last_token)
    END;
    below := least(held, least(granted, 999999999999999) + 1);
    idle := ARRAY(
        SELECT r.resource FROM tower_fence.resources AS r
        LEFT JOIN tower_fence.leases AS l ON l.resource = r.resource
        WHERE r.partition = remove_idle_of.partition AND r.updated_at < idle_since
            AND greatest(r.max_token, r.announced, l.token) < below
            AND (
                r.history <> ALL (own_floor.unchanged_histories)
                AND greatest(r.max_token, r.announced)
                    > own_floor.failover_floor - 1000 * tower_fence.forgotten_epochs(r.history, own_floor.history)
            ) IS NOT TRUE
            AND coalesce(l.expires_at + l.lock_delay < idle_since, true)
            AND NOT EXISTS (
                SELECT FROM tower_fence.waiters AS w
                WHERE w.resource = r.resource AND tower_fence.listener_lives(w.listener)
            )
        LIMIT max_rows
    );
    IF cardinality(idle) = 0 THEN
        RETURN 0;
    END IF;
    BEGIN
        -- Take the locks in the order of after_failover().
        LOCK TABLE tower_fence.resources IN ROW EXCLUSIVE MODE;
        PERFORM FROM tower_fence.floors AS l WHERE l.partition = remove_idle_of.partition
            AND l.history = own_floor.history AND l.failover_floor = own_floor.failover_floor
            AND l.unchanged_histories = own_floor.unchanged_histories
        FOR UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        -- Rows of this partition are being inserted, or after_failover() is running. The next call
        -- removes the idle rows.
        RETURN 0;
    END;
    -- A failover was detected in the meantime, which may change which rows can be removed. The next
    -- call removes the idle rows.
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    idle := ARRAY(
        SELECT r.resource FROM tower_fence.resources AS r
        WHERE r.resource = ANY (idle) AND r.updated_at < idle_since
            AND greatest(r.max_token, r.announced) < below
        FOR UPDATE SKIP LOCKED
    );
    -- A grant needs the lock of the row of the resource, which this transaction now holds, and an
    -- expired lease is never renewed. Therefore the leases that are read here do not change.
    idle := ARRAY(
        SELECT n.name FROM unnest(idle) AS n (name) LEFT JOIN tower_fence.leases AS l ON l.resource = n.name
        WHERE coalesce(l.expires_at + l.lock_delay < idle_since AND l.token < below, true)
    );
    WITH gone AS (
        DELETE FROM tower_fence.leases AS l
        USING (SELECT o.resource FROM tower_fence.leases AS o WHERE o.resource = ANY (idle) FOR UPDATE SKIP LOCKED) AS s
        WHERE l.resource = s.resource
        RETURNING l.token
    )
    SELECT max(g.token) INTO stale_by_lease FROM gone AS g;
    DELETE FROM tower_fence.queues AS q
    USING (SELECT o.resource FROM tower_fence.queues AS o WHERE o.resource = ANY (idle) FOR UPDATE SKIP LOCKED) AS s
    WHERE q.resource = s.resource
        AND NOT EXISTS (SELECT FROM tower_fence.leases AS l WHERE l.resource = q.resource);
    DELETE FROM tower_fence.waiters AS w
    USING (
        SELECT o.resource, o.ticket FROM tower_fence.waiters AS o
        WHERE o.resource = ANY (idle) AND NOT tower_fence.listener_lives(o.listener) FOR UPDATE SKIP LOCKED
    ) AS s
    WHERE w.resource = s.resource AND w.ticket = s.ticket;
    WITH gone AS (
        DELETE FROM tower_fence.resources AS r WHERE r.resource = ANY (idle)
            AND NOT EXISTS (SELECT FROM tower_fence.leases AS l WHERE l.resource = r.resource)
        RETURNING greatest(r.max_token, r.announced) AS stale
    )
    SELECT count(*), max(g.stale) INTO removed, stale FROM gone AS g;
    UPDATE tower_fence.floors AS l SET floor = greatest(stale, stale_by_lease)
    WHERE l.partition = remove_idle_of.partition AND l.floor < greatest(stale, stale_by_lease);
    RETURN removed;
END
$fence$;
COMMENT ON FUNCTION tower_fence.remove_idle_of IS
    'Removes idle rows of one partition in this transaction, and returns the number of removed rows. remove_idle() '
    'calls this function.';

-- A procedure that commits can have neither SECURITY DEFINER nor a search_path of its own.
CREATE PROCEDURE tower_fence.remove_idle(
    older_than interval DEFAULT NULL, max_rows bigint DEFAULT NULL, granted bigint DEFAULT NULL,
    older_than_ms bigint DEFAULT NULL, INOUT removed bigint DEFAULT 0
)
LANGUAGE plpgsql AS $fence$
DECLARE
    age CONSTANT interval := coalesce(
        older_than, pg_catalog.make_interval(secs => older_than_ms OPERATOR(pg_catalog./) 1000.0::double precision)
    );
    batch CONSTANT integer := 500;
    wanted integer;
    of_batch integer;
BEGIN
    IF pg_catalog.num_nonnulls(older_than, older_than_ms) OPERATOR(pg_catalog.<>) 1 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = 'pass the age of idle rows either as older_than or as older_than_ms';
    END IF;
    removed := 0;
    FOR number IN 0 .. 255 LOOP
        LOOP
            wanted := LEAST(batch, max_rows OPERATOR(pg_catalog.-) removed);
            IF wanted OPERATOR(pg_catalog.=) 0 THEN
                RETURN;
            END IF;
            of_batch := tower_fence.remove_idle_of(number::smallint, age, wanted, granted, NULL);
            removed := removed OPERATOR(pg_catalog.+) of_batch;
            COMMIT;
            -- A batch is smaller than requested if some of its rows are in use.
            EXIT WHEN of_batch OPERATOR(pg_catalog.<=) (wanted OPERATOR(pg_catalog./) 2);
        END LOOP;
    END LOOP;
END
$fence$;
COMMENT ON PROCEDURE tower_fence.remove_idle IS
    'Removes rows that have not been used for the given time, in all partitions, and returns the number of removed '
    'rows. Commits after each batch, so call it outside of a transaction, for example from pg_cron. No stale token '
    'becomes valid again. For issuers without epochs, `granted` is the highest token known to have been granted.';

CREATE FUNCTION tower_fence.remove_expired_keys(max_rows integer DEFAULT 1000)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $fence$
DECLARE
    removed integer;
BEGIN
    -- A materialized query runs once. A subquery in FROM may run once for each row of the other
    -- table, and each run would skip the keys that earlier runs have removed. LIMIT would then not
    -- limit the number of removed keys.
    WITH expired AS MATERIALIZED (
        SELECT o.scope, o.key FROM tower_fence.idempotency_keys AS o WHERE o.expires_at <= now()
        ORDER BY o.expires_at LIMIT max_rows FOR UPDATE SKIP LOCKED
    )
    DELETE FROM tower_fence.idempotency_keys AS k USING expired AS s
    WHERE k.scope = s.scope AND k.key = s.key;
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
END
$fence$;
COMMENT ON FUNCTION tower_fence.remove_expired_keys IS
    'Removes at most max_rows expired idempotency keys, and returns the number of removed keys.';
