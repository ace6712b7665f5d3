//! A statement together with its admission, for Postgres.

/// What the error says with which [`at_once`] undoes itself.
pub(super) const NOTHING: &str = "tower-fence: nothing is written at once";

/// A statement with its admission, for a resource, a token, what is dead then, an advisory lock and
/// a limit for locks that are bound behind the arguments of its own. It writes under an admitted token and returns what it has
/// written, or nothing stays of it.
///
/// The subquery sees the snapshot, `f.xmin` is that of the newest version of the row: where they
/// differ, another write came after the snapshot was taken, and the statement would not see it.
/// `max_token` would not do in the place of `xmin`: a reusable write commits without moving it.
/// Without a row in `fence` and in `work` the cast fails, so that the token is not used up, and not
/// even a trigger has had its effect.
pub(super) fn at_once(schema: &str, statement: &str, bound: usize) -> String {
    let [resource, token, dead, lock, wait] = [1, 2, 3, 4, 5].map(|place| bound + place);
    format!(
        "WITH fence AS (\
            UPDATE {schema}.fence_resources AS f \
            SET max_token = ${dead}, updated_at = CURRENT_TIMESTAMP, \
                admitted_by = pg_catalog.pg_current_xact_id() \
            WHERE f.resource = ${resource} AND f.max_token < ${token} \
                AND f.history = {schema}.fence_history() \
                AND pg_catalog.pg_try_advisory_xact_lock_shared(${lock}) IS NOT NULL AND f.xmin = (\
                SELECT s.xmin FROM {schema}.fence_resources AS s \
                WHERE s.resource = ${resource} \
                    AND pg_catalog.set_config('lock_timeout', ${wait}, true) IS NOT NULL) \
            RETURNING 1\
        ), work AS ({statement}\n) SELECT work.* FROM (SELECT 1) AS always LEFT JOIN work ON true \
        WHERE CASE WHEN EXISTS (SELECT 1 FROM work) AND EXISTS (SELECT 1 FROM fence) THEN true \
            ELSE ('{NOTHING}, in ' || pg_backend_pid())::boolean END"
    )
}
