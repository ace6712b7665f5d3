-- Rows do not live for ever. Where rows were removed, their partition keeps a floor: the highest token that
-- was dead or granted on any of them. A resource without a row is admissible only above it, so every statement
-- that inserts a row reads the floor FOR SHARE: it waits for a removal, and sees what that has left.
-- Each page has few of these rows, since many transactions lock them at once.
CREATE TABLE fence_floors (
    partition smallint PRIMARY KEY,
    floor bigint NOT NULL DEFAULT 0,
    -- Always null. A right to update is what it takes to lock a row, and this is a column to have it on.
    lockable boolean CHECK (lockable IS NULL),
    history text COLLATE "C",
    -- What was dead on all rows when tokens died here the last time, and the histories since then.
    live_histories text[] COLLATE "C",
    failover_floor bigint NOT NULL DEFAULT 0
) WITH (fillfactor = 10);

-- The partition is null in rows that are older than this. Who admitted last is a transaction: a savepoint's
-- admission has the number of the whole one here, which `xmin` has not.
ALTER TABLE fence_resources
    ADD COLUMN partition smallint,
    ADD COLUMN admitted_by xid8;
CREATE INDEX fence_resources_partition ON fence_resources (partition);

-- A database that fails over, or is restored, may have lost what it confirmed last: also that a fence was
-- raised, so that an older holder writes, and the newer one over it. A server tells by the time line of its log
-- that this may have happened; its version stands in front, since a new one begins to count time lines anew. Each
-- row and each partition keeps the one in which it was written. Nothing is admitted on a row of another history before
-- fence_catch_up has made all tokens dead that may be forgotten.
ALTER TABLE fence_epoch_source ADD COLUMN notices_failover boolean NOT NULL DEFAULT true;

-- The history in which this server writes; null while it is a standby, and always '' where a server does not tell.
-- It is a part of each admission, which it is put into as it stands: so it has no settings of its own.
DO $fence$
DECLARE
    time_line text := $line$SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN
        pg_catalog.left(pg_catalog.current_setting('server_version_num'), 2)
        || pg_catalog.left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_lsn()), 8) END$line$;
    here text;
BEGIN
    BEGIN
        EXECUTE time_line INTO here;
    -- The functions are missing, or the server refuses them as not supported. Any other error ends the migration.
    EXCEPTION WHEN undefined_function OR feature_not_supported THEN
        RAISE WARNING USING
            MESSAGE = concat('tower-fence: no failover of this server will be noticed: ', SQLERRM),
            HINT = 'Call fence_after_failover after each promotion and each restore.';
        here := '';
        time_line := 'SELECT pg_catalog.text '''' ';
    END;
    EXECUTE format('CREATE FUNCTION fence_history() RETURNS text LANGUAGE sql AS %L', time_line);
    GRANT EXECUTE ON FUNCTION fence_history() TO PUBLIC;
    INSERT INTO fence_floors (partition, history, live_histories)
    SELECT place, here, ARRAY[here] FROM generate_series(0, 255) AS place;
    -- A constant, which rewrites no row.
    EXECUTE format('ALTER TABLE fence_resources ADD COLUMN history text COLLATE "C" DEFAULT %L', here);
    ALTER TABLE fence_resources ALTER COLUMN history DROP DEFAULT;
END
$fence$;

-- The low byte of the CRC-32 (IEEE 802.3) of a name's UTF-8, half a byte at a time.
CREATE FUNCTION fence_partition(resource text)
RETURNS smallint LANGUAGE plpgsql IMMUTABLE STRICT AS $fence$
DECLARE
    remainders CONSTANT bigint[] := '{
        0, 498536548, 997073096, 651767980, 1994146192, 1802195444, 1303535960, 1342533948,
        3988292384, 4027552580, 3604390888, 3412177804, 2607071920, 2262029012, 2685067896, 3183342108
    }';
    name CONSTANT bytea := convert_to(fence_partition.resource, 'UTF8');
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

-- The last token of the last epoch that was handed out in a partition. Those below the first epoch are other issuers'.
CREATE FUNCTION fence_handed_out(partition smallint)
RETURNS bigint LANGUAGE plpgsql STABLE AS $fence$
#variable_conflict use_column
BEGIN
    RETURN 999999999 + 1000000000 * coalesce(
        (SELECT e.epoch FROM fence_epochs AS e WHERE e.partition = fence_handed_out.partition), 0
    );
END
$fence$;

-- How many epochs may be forgotten since a history: 1,000 for each time line, also for those that nobody here has seen,
-- are more than a lost part of the log has handed out.
CREATE FUNCTION fence_forgotten_epochs(before text, here text)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $fence$
    SELECT 1000 * CASE
        WHEN before = here THEN 0
        WHEN before ~ '^[0-9]{2}[0-9A-F]{8}$' AND left(before, 2) = left(here, 2)
            THEN greatest(1, ('x' || right(here, 8))::bit(32)::bigint - ('x' || right(before, 8))::bit(32)::bigint)
        ELSE 1
    END
$fence$;

-- Makes all tokens of a partition dead that were handed out in any history, and those that may be forgotten. Where no
-- partition has an epoch, all tokens are those of other issuers, and stay as they are. Returns its failover floor, or
-- null there.
CREATE FUNCTION fence_move_up(partition smallint, forgotten bigint)
RETURNS bigint LANGUAGE plpgsql AS $fence$
#variable_conflict use_column
DECLARE
    epochs CONSTANT bigint := least(fence_move_up.forgotten, 999999);
    dead bigint;
BEGIN
    -- That of a partition without epochs may be forgotten, too, where others have some.
    INSERT INTO fence_epochs AS e (partition, epoch)
    SELECT fence_move_up.partition, epochs WHERE EXISTS (SELECT FROM fence_epochs AS o WHERE o.epoch > 0)
    ON CONFLICT (partition) DO UPDATE SET epoch = least(e.epoch + epochs, 999999)
    RETURNING e.epoch * 1000000000 + 999999999 INTO dead;
    UPDATE fence_floors AS l SET
        floor = greatest(l.floor, dead),
        failover_floor = greatest(l.failover_floor, dead)
    WHERE l.partition = fence_move_up.partition AND dead IS NOT NULL;
    RETURN dead;
END
$fence$;

-- What is dead on a row after a failover, at which all up to that floor died. A row above what was handed out has
-- seen a token from elsewhere or a forged one, or one shortly below has, and grants were made above that: in a part that
-- was lost not more than 1,000 for each epoch that may be forgotten.
CREATE FUNCTION fence_dead_after(
    max_token bigint, announced bigint, failover_floor bigint, handed_out bigint, forgotten bigint
)
RETURNS bigint LANGUAGE sql IMMUTABLE AS $fence$
    SELECT CASE
        WHEN failover_floor = 0 THEN max_token
        WHEN greatest(max_token, announced) > handed_out - 1000 * forgotten
            THEN least(greatest(max_token, announced) + 1000 * forgotten, 999999999999999)
        ELSE greatest(max_token, failover_floor)
    END
$fence$;

CREATE FUNCTION fence_refuse_incomplete(partition smallint)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
    IF row_security_active('fence_floors') THEN
        RAISE EXCEPTION USING
            ERRCODE = 'insufficient_privilege',
            MESSAGE = 'row-level security hides rows of fence_floors from the fence',
            HINT = 'Disable row-level security on the tables of the fence.';
    END IF;
    RAISE EXCEPTION USING
        ERRCODE = 'object_not_in_prerequisite_state',
        MESSAGE = concat(
            'fence_floors shows no row for partition ', fence_refuse_incomplete.partition,
            CASE WHEN row_security_active('fence_floors')
                THEN ': row-level security hides it'
                ELSE ': the tables of the fence were emptied, or restored in part'
            END
        );
END
$fence$;

-- Brings a partition into the history of this server, and returns whether it was in another one.
CREATE FUNCTION fence_catch_up_partition(partition smallint)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := fence_history();
    before text;
    moved boolean := false;
BEGIN
    IF here IS NULL OR EXISTS (
        SELECT FROM fence_floors AS l WHERE l.partition = fence_catch_up_partition.partition AND l.history = here
    ) THEN
        RETURN false;
    END IF;
    SELECT l.history INTO before FROM fence_floors AS l
    WHERE l.partition = fence_catch_up_partition.partition FOR UPDATE;
    IF NOT FOUND THEN
        PERFORM fence_refuse_incomplete(fence_catch_up_partition.partition);
    END IF;
    IF before = here THEN
        RETURN true;
    END IF;
    IF EXISTS (SELECT FROM fence_epoch_source AS s WHERE s.notices_failover) THEN
        moved := fence_move_up(
            fence_catch_up_partition.partition, fence_forgotten_epochs(before, here)
        ) IS NOT NULL;
        RAISE LOG 'tower-fence: partition % is in history % now: tokens of another one are dead',
            fence_catch_up_partition.partition, here;
    END IF;
    UPDATE fence_floors AS l SET
        history = here, live_histories = CASE WHEN moved THEN ARRAY[here] ELSE l.live_histories || here END
    WHERE l.partition = fence_catch_up_partition.partition;
    RETURN true;
END
$fence$;

-- The same with the row of a resource, if it has one, and with its lease. A row is judged by what was handed out when
-- tokens died here, since epochs go on meanwhile. One that was used since then goes on; and one that only versions know
-- that keep no history is taken for such a one, up to what is handed out now.
CREATE FUNCTION fence_catch_up(resource text)
RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    here CONSTANT text := fence_history();
    own_partition smallint;
BEGIN
    IF here IS NULL OR EXISTS (
        SELECT FROM fence_resources AS f WHERE f.resource = fence_catch_up.resource AND f.history = here
    ) THEN
        RETURN false;
    END IF;
    own_partition := fence_partition(fence_catch_up.resource);
    IF NOT EXISTS (SELECT FROM fence_resources AS f WHERE f.resource = fence_catch_up.resource) THEN
        RETURN fence_catch_up_partition(own_partition);
    END IF;
    PERFORM fence_catch_up_partition(own_partition);
    UPDATE fence_resources AS f SET
        max_token = CASE
            WHEN f.history = ANY (s.live_histories) THEN f.max_token
            ELSE fence_dead_after(
                f.max_token, f.announced, s.failover_floor,
                CASE WHEN f.history IS NULL THEN fence_handed_out(own_partition) ELSE s.failover_floor END,
                fence_forgotten_epochs(f.history, s.history)
            )
        END,
        partition = own_partition,
        history = s.history
    FROM (
        SELECT l.failover_floor, l.live_histories, l.history
        FROM fence_floors AS l WHERE l.partition = own_partition FOR SHARE
    ) AS s
    WHERE f.resource = fence_catch_up.resource AND f.history IS DISTINCT FROM s.history;
    PERFORM fence_end_outranked(fence_catch_up.resource);
    RETURN true;
END
$fence$;

DROP FUNCTION fence_refuse_stale(text, bigint, bigint);
CREATE FUNCTION fence_refuse_stale(
    resource text, presented_token bigint, max_token bigint, by_floor boolean
)
RETURNS void LANGUAGE plpgsql AS $fence$
DECLARE
    message text := concat(
        'token ', presented_token, ' for ', resource, ' is not newer than ', max_token,
        CASE WHEN by_floor THEN ', the floor of its partition' END
    );
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'TF412',
        MESSAGE = message,
        DETAIL = json_strip_nulls(json_build_object(
            'type', 'https://docs.rs/tower-fence/latest/tower_fence/problem/#stale-token',
            'title', 'The fencing token is stale',
            'status', 412,
            'detail', message,
            'resource', resource,
            'presented_token', presented_token,
            'max_token', max_token,
            'by_floor', CASE WHEN by_floor THEN true END
        ))::text;
END
$fence$;

-- Refuses a token that is not newer than what its resource has seen, or, where that has no row, than the floor. Returns
-- where it is newer: what another history or a row has refused is no refusal once somebody has brought the resource out of
-- that history, or has removed that row.
CREATE FUNCTION fence_refuse_dead(resource text, token bigint)
RETURNS void LANGUAGE plpgsql AS $fence$
#variable_conflict use_column
DECLARE
    dead bigint := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_refuse_dead.resource);
    by_floor boolean := dead IS NULL;
BEGIN
    IF by_floor THEN
        dead := (
            SELECT l.floor FROM fence_floors AS l
            WHERE l.partition = fence_partition(fence_refuse_dead.resource)
        );
        IF dead IS NULL THEN
            PERFORM fence_refuse_incomplete(fence_partition(fence_refuse_dead.resource));
        END IF;
    END IF;
    IF dead >= fence_refuse_dead.token THEN
        PERFORM fence_refuse_stale(fence_refuse_dead.resource, fence_refuse_dead.token, dead, by_floor);
    END IF;
END
$fence$;

-- Refuses where several attempts found neither what is newer nor a row to change.
CREATE FUNCTION fence_refuse_changing(resource text)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
    RAISE EXCEPTION USING
        ERRCODE = 'serialization_failure',
        MESSAGE = concat(fence_refuse_changing.resource, ' was changed again and again meanwhile');
END
$fence$;

-- Warns where a call is a transaction of its own: its effect ends with the statement, before any write. The caller is not
-- another function. In the simple protocol such a statement begins its transaction, and its message has no other statement
-- in it; in the extended protocol its portal does, unless the statement is parsed in the same batch, which leaves no trace.
CREATE FUNCTION fence_warn_alone(name text)
RETURNS void LANGUAGE plpgsql AS $fence$
BEGIN
    IF (CASE WHEN statement_timestamp() = transaction_timestamp()
        THEN position(';' IN rtrim(current_query(), E'; \t\r\n')) = 0
        ELSE EXISTS (
            SELECT FROM pg_cursors AS c WHERE c.name = '' AND c.creation_time = transaction_timestamp()
        )
    END) THEN
        RAISE WARNING USING
            ERRCODE = 'no_active_sql_transaction',
            MESSAGE = concat(fence_warn_alone.name, ' has no effect on later statements: it is a transaction of its own'),
            HINT = 'Call it in the transaction that writes: BEGIN, this call, the writes, COMMIT.';
    END IF;
END
$fence$;

CREATE OR REPLACE FUNCTION fence_admit(resource text, token bigint, reusable boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    dead bigint;
    found_token bigint;
    context text;
BEGIN
    -- One line where no other function calls this one.
    GET DIAGNOSTICS context = PG_CONTEXT;
    IF position(E'\n' IN context) = 0 THEN
        PERFORM fence_warn_alone('fence_admit');
    END IF;
    IF (fence_admit.token BETWEEN 1 AND 999999999999999) IS NOT TRUE THEN
        PERFORM fence_check_token(fence_admit.token);
    END IF;
    dead := CASE WHEN fence_admit.reusable THEN fence_admit.token - 1 ELSE fence_admit.token END;

    FOR attempt IN 1 .. 3 LOOP
        UPDATE fence_resources AS f
        SET max_token = dead, updated_at = CURRENT_TIMESTAMP, admitted_by = pg_current_xact_id()
        WHERE f.resource = fence_admit.resource AND f.max_token < fence_admit.token
            AND f.history = fence_history();
        IF FOUND THEN
            RETURN dead;
        END IF;

        -- There is no row, or a newer one, or one of another history. Each statement sees what was committed
        -- before it.
        found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_admit.resource);
        IF found_token IS NULL THEN
            PERFORM fence_check_resource(fence_admit.resource);
        END IF;
        IF found_token IS NULL OR found_token < fence_admit.token THEN
            INSERT INTO fence_resources AS f (resource, max_token, updated_at, partition, admitted_by, history)
            SELECT fence_admit.resource, dead, CURRENT_TIMESTAMP, s.partition, pg_current_xact_id(), s.history
            FROM (
                SELECT l.partition, l.floor, l.history FROM fence_floors AS l
                WHERE l.partition = fence_partition(fence_admit.resource) AND l.history = fence_history()
                FOR SHARE
            ) AS s
            WHERE fence_admit.token > s.floor
            ON CONFLICT (resource) DO UPDATE
                SET max_token = excluded.max_token, updated_at = excluded.updated_at,
                    admitted_by = excluded.admitted_by
                WHERE f.max_token < fence_admit.token AND f.history = excluded.history;
            IF FOUND THEN
                RETURN dead;
            END IF;
        END IF;
        CONTINUE WHEN fence_catch_up(fence_admit.resource);
        PERFORM fence_refuse_dead(fence_admit.resource, fence_admit.token);
    END LOOP;
    PERFORM fence_refuse_changing(fence_admit.resource);
END
$fence$;

CREATE OR REPLACE FUNCTION fence_raise(resource text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    dead bigint;
    found_token bigint;
    is_behind boolean;
BEGIN
    PERFORM fence_check_token(fence_raise.token);
    dead := fence_raise.token - 1;

    FOR attempt IN 1 .. 3 LOOP
        -- The row may be younger than the transaction: its time does not go back.
        UPDATE fence_resources AS f
        SET max_token = dead, updated_at = greatest(f.updated_at, CURRENT_TIMESTAMP)
        WHERE f.resource = fence_raise.resource AND f.max_token < dead AND f.history = fence_history();
        IF FOUND THEN
            RETURN dead;
        END IF;

        SELECT f.max_token, f.history IS DISTINCT FROM fence_history() INTO found_token, is_behind
        FROM fence_resources AS f WHERE f.resource = fence_raise.resource;
        IF found_token = dead AND NOT is_behind THEN
            RETURN dead;
        ELSIF found_token IS NULL THEN
            PERFORM fence_check_resource(fence_raise.resource);
            INSERT INTO fence_resources AS f (resource, max_token, updated_at, partition, history)
            SELECT fence_raise.resource, dead, CURRENT_TIMESTAMP, s.partition, s.history
            FROM (
                SELECT l.partition, l.floor, l.history FROM fence_floors AS l
                WHERE l.partition = fence_partition(fence_raise.resource) AND l.history = fence_history()
                FOR SHARE
            ) AS s
            WHERE fence_raise.token > s.floor
            ON CONFLICT (resource) DO UPDATE
                SET max_token = excluded.max_token, updated_at = greatest(f.updated_at, CURRENT_TIMESTAMP)
                WHERE f.max_token < dead AND f.history = excluded.history;
            IF FOUND THEN
                RETURN dead;
            END IF;
        END IF;
        CONTINUE WHEN fence_catch_up(fence_raise.resource);
        PERFORM fence_refuse_dead(fence_raise.resource, fence_raise.token);
    END LOOP;
    PERFORM fence_refuse_changing(fence_raise.resource);
END
$fence$;

-- The highest token that is dead; null where nothing is, for all that is known.
CREATE OR REPLACE FUNCTION fence_max_token(resource text)
RETURNS bigint LANGUAGE plpgsql STABLE SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    found_token bigint := (
        SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_max_token.resource
    );
BEGIN
    IF found_token IS NULL THEN
        PERFORM fence_check_resource(fence_max_token.resource);
        found_token := (
            SELECT l.floor FROM fence_floors AS l
            WHERE l.partition = fence_partition(fence_max_token.resource) AND l.floor > 0
        );
    END IF;
    RETURN found_token;
END
$fence$;

DO $fence$
DECLARE
    made regprocedure;
BEGIN
    FOREACH made IN ARRAY ARRAY[
        'fence_partition(text)',
        'fence_handed_out(smallint)',
        'fence_forgotten_epochs(text, text)',
        'fence_move_up(smallint, bigint)',
        'fence_dead_after(bigint, bigint, bigint, bigint, bigint)',
        'fence_refuse_incomplete(smallint)',
        'fence_catch_up_partition(smallint)',
        'fence_catch_up(text)',
        'fence_refuse_stale(text, bigint, bigint, boolean)',
        'fence_refuse_dead(text, bigint)',
        'fence_refuse_changing(text)',
        'fence_admit(text, bigint, boolean)',
        'fence_raise(text, bigint)',
        'fence_max_token(text)'
    ]::regprocedure[] LOOP
        EXECUTE format(
            'ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', made, current_schema()
        );
        EXECUTE format('REVOKE ALL ON FUNCTION %s FROM PUBLIC', made);
    END LOOP;
    -- It has its path from its callers. A setting of its own would cost more than what it does.
    REVOKE ALL ON FUNCTION fence_warn_alone(text) FROM PUBLIC;
END
$fence$;
