-- Rows do not live for ever. Where rows were removed, their partition keeps a floor: the highest token that
-- was dead or granted on any of them. A resource without a row is admissible only above it, so every statement
-- that inserts a row reads the floor FOR SHARE: it waits for a removal, and sees what that has left.
-- Each page has few of these rows, since many transactions lock them at once.
CREATE TABLE fence_floors (
    partition smallint PRIMARY KEY,
    floor bigint NOT NULL DEFAULT 0,
    -- Always null. A right to update is what it takes to lock a row, and this is a column to have it on.
    lockable boolean CHECK (lockable IS NULL)
) WITH (fillfactor = 10);
INSERT INTO fence_floors (partition) SELECT generate_series(0, 255);

-- The partition is null in rows that are older than this. Who admitted last is a transaction: a savepoint's
-- admission has the number of the whole one here, which `xmin` has not.
ALTER TABLE fence_resources
    ADD COLUMN partition smallint,
    ADD COLUMN admitted_by xid8;
CREATE INDEX fence_resources_partition ON fence_resources (partition);

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

-- Refuses a token that is not newer than what its resource has seen, or, where that has no row, than the floor.
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
    END IF;
    PERFORM fence_refuse_stale(
        fence_refuse_dead.resource, fence_refuse_dead.token, greatest(dead, fence_refuse_dead.token), by_floor
    );
END
$fence$;

CREATE OR REPLACE FUNCTION fence_admit(resource text, token bigint, reusable boolean DEFAULT false)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    dead bigint;
    found_token bigint;
BEGIN
    IF (fence_admit.token BETWEEN 1 AND 999999999999999) IS NOT TRUE THEN
        PERFORM fence_check_token(fence_admit.token);
    END IF;
    dead := CASE WHEN fence_admit.reusable THEN fence_admit.token - 1 ELSE fence_admit.token END;

    UPDATE fence_resources AS f
    SET max_token = dead, updated_at = CURRENT_TIMESTAMP, admitted_by = pg_current_xact_id()
    WHERE f.resource = fence_admit.resource AND f.max_token < fence_admit.token;
    IF FOUND THEN
        RETURN dead;
    END IF;

    -- There is no row, or a newer one. Each statement sees what was committed before it.
    found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_admit.resource);
    IF found_token IS NULL THEN
        PERFORM fence_check_resource(fence_admit.resource);
    END IF;
    IF found_token IS NULL OR found_token < fence_admit.token THEN
        INSERT INTO fence_resources AS f (resource, max_token, updated_at, partition, admitted_by)
        SELECT fence_admit.resource, dead, CURRENT_TIMESTAMP, s.partition, pg_current_xact_id()
        FROM (
            SELECT l.partition, l.floor FROM fence_floors AS l
            WHERE l.partition = fence_partition(fence_admit.resource) FOR SHARE
        ) AS s
        WHERE fence_admit.token > s.floor
        ON CONFLICT (resource) DO UPDATE
            SET max_token = excluded.max_token, updated_at = excluded.updated_at,
                admitted_by = excluded.admitted_by
            WHERE f.max_token < fence_admit.token;
        IF FOUND THEN
            RETURN dead;
        END IF;
    END IF;
    PERFORM fence_refuse_dead(fence_admit.resource, fence_admit.token);
END
$fence$;

CREATE OR REPLACE FUNCTION fence_raise(resource text, token bigint)
RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    dead bigint;
    found_token bigint;
BEGIN
    PERFORM fence_check_token(fence_raise.token);
    dead := fence_raise.token - 1;

    -- The row may be younger than the transaction: its time does not go back.
    UPDATE fence_resources AS f
    SET max_token = dead, updated_at = greatest(f.updated_at, CURRENT_TIMESTAMP)
    WHERE f.resource = fence_raise.resource AND f.max_token < dead;
    IF FOUND THEN
        RETURN dead;
    END IF;

    found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_raise.resource);
    IF found_token IS NULL THEN
        PERFORM fence_check_resource(fence_raise.resource);
    END IF;
    IF found_token IS NULL OR found_token < dead THEN
        INSERT INTO fence_resources AS f (resource, max_token, updated_at, partition)
        SELECT fence_raise.resource, dead, CURRENT_TIMESTAMP, s.partition
        FROM (
            SELECT l.partition, l.floor FROM fence_floors AS l
            WHERE l.partition = fence_partition(fence_raise.resource) FOR SHARE
        ) AS s
        WHERE fence_raise.token > s.floor
        ON CONFLICT (resource) DO UPDATE
            SET max_token = excluded.max_token, updated_at = greatest(f.updated_at, CURRENT_TIMESTAMP)
            WHERE f.max_token < dead;
        IF FOUND THEN
            RETURN dead;
        END IF;
        found_token := (SELECT f.max_token FROM fence_resources AS f WHERE f.resource = fence_raise.resource);
    END IF;
    IF found_token IS NULL OR found_token >= fence_raise.token THEN
        PERFORM fence_refuse_dead(fence_raise.resource, fence_raise.token);
    END IF;
    RETURN found_token;
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

-- Removes rows of one partition that were not used for so long, at most so many, and returns how many. The
-- floor is locked first and for a short time only; a row that is in use is left.
--
-- A floor refuses whoever is below it. So a row is left where its token is not below `live`, the lowest one of a
-- lease that is held, or is above `granted`, what an issuer has surely granted: without that, the last epoch
-- that was handed out. One forged token closes no partition.
CREATE FUNCTION fence_remove_idle_of(
    partition smallint, older_than interval, at_most integer, granted bigint, live bigint
)
RETURNS integer LANGUAGE plpgsql SECURITY DEFINER AS $fence$
#variable_conflict use_column
DECLARE
    idle_since CONSTANT timestamptz := CURRENT_TIMESTAMP - older_than;
    below bigint;
    idle text[];
    removed integer;
    dead bigint;
BEGIN
    IF (idle_since <= CURRENT_TIMESTAMP AND at_most > 0) IS NOT TRUE THEN
        RAISE EXCEPTION USING
            ERRCODE = 'invalid_parameter_value',
            MESSAGE = 'older_than is a time of 0 or more, and at_most is 1 or more';
    END IF;
    -- Tokens below the first epoch are those of other issuers.
    granted := coalesce(granted, 1000000000 * (1 + coalesce(
        (SELECT e.epoch FROM fence_epochs AS e WHERE e.partition = fence_remove_idle_of.partition), 0
    )) - 1);
    below := least(live, least(granted, 999999999999999) + 1);
    -- Looked for without a lock, which nobody has to wait for.
    idle := ARRAY(
        SELECT f.resource FROM fence_resources AS f
        WHERE f.partition = fence_remove_idle_of.partition AND f.updated_at < idle_since
            AND greatest(f.max_token, f.announced) < below
        LIMIT at_most
    );
    IF cardinality(idle) = 0 THEN
        RETURN 0;
    END IF;
    BEGIN
        PERFORM FROM fence_floors AS l WHERE l.partition = fence_remove_idle_of.partition FOR UPDATE;
    EXCEPTION WHEN lock_not_available THEN
        -- New resources of this partition are being written. Another time.
        RETURN 0;
    END;
    idle := ARRAY(
        SELECT f.resource FROM fence_resources AS f
        WHERE f.resource = ANY (idle) AND f.updated_at < idle_since
            AND greatest(f.max_token, f.announced) < below
        FOR UPDATE SKIP LOCKED
    );
    WITH gone AS (
        DELETE FROM fence_resources AS f WHERE f.resource = ANY (idle)
        RETURNING greatest(f.max_token, f.announced) AS dead
    )
    SELECT count(*), max(g.dead) INTO removed, dead FROM gone AS g;
    UPDATE fence_floors AS l SET floor = dead
    WHERE l.partition = fence_remove_idle_of.partition AND l.floor < dead;
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
        'fence_partition(text)',
        'fence_refuse_stale(text, bigint, bigint, boolean)',
        'fence_refuse_dead(text, bigint)',
        'fence_admit(text, bigint, boolean)',
        'fence_raise(text, bigint)',
        'fence_max_token(text)',
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
