-- Names are UTF-8. Another encoding cannot store all of them, or would compare them by other bytes.
DO $fence$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION USING
            ERRCODE = 'feature_not_supported',
            MESSAGE = concat('the encoding of the database is ', current_setting('server_encoding'),
                ', and the fence needs UTF8'),
            HINT = 'Create a database with ENCODING ''UTF8'' TEMPLATE template0.';
    END IF;
END
$fence$;

-- One row per resource that was ever written: the highest token that is dead.
-- Every write updates its row in place; the free space keeps those updates on the page (HOT).
CREATE TABLE fence_resources (
    resource text PRIMARY KEY,
    max_token bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 70);

-- One row per partition of the lease store: the last epoch that was handed out.
CREATE TABLE fence_epochs (
    partition smallint PRIMARY KEY,
    epoch bigint NOT NULL
);
