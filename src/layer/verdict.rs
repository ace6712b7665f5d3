//! What becomes of a request's transaction, and of the fence, once its handler has ended.

use http::StatusCode;

/// What becomes of a request's transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// COMMIT.
    Commit,
    /// It is rolled back, and the fence raised: everyone older is dead, the token stays usable.
    Raise,
    /// It is rolled back, and the fence stays where it was: whoever sent the request was turned
    /// away without being served.
    Leave,
}

/// Decides by what the handler answered, if it answered, and by whether it had `used` its
/// transaction.
///
/// 401, 403 and 405 turn somebody away who has no business here: a token that such a request brings
/// may be any number. So may that of a request which no handler could read (400, 413, 415, 422);
/// but a handler may give these answers as well, of what it has seen. It has seen something
/// where it had used the transaction.
pub(super) fn verdict(status: Option<StatusCode>, used: bool) -> Verdict {
    match status.map(|status| status.as_u16()) {
        Some(..400) => Verdict::Commit,
        Some(401 | 403 | 405) => Verdict::Leave,
        Some(400 | 413 | 415 | 422) if !used => Verdict::Leave,
        // What broke off in the middle may have been seen, as well.
        Some(_) | None => Verdict::Raise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_turned_away_leaves_the_fence_where_it_was() {
        use Verdict::{Commit, Leave, Raise};
        // The status, and the verdict on a transaction that was not used, and on one that was.
        let table = [
            (Some(200), Commit, Commit),
            (Some(204), Commit, Commit),
            (Some(303), Commit, Commit),
            (Some(399), Commit, Commit),
            (Some(400), Leave, Raise),
            (Some(401), Leave, Leave),
            (Some(403), Leave, Leave),
            (Some(404), Raise, Raise),
            (Some(405), Leave, Leave),
            (Some(409), Raise, Raise),
            (Some(412), Raise, Raise),
            (Some(413), Leave, Raise),
            (Some(415), Leave, Raise),
            (Some(422), Leave, Raise),
            (Some(429), Raise, Raise),
            (Some(500), Raise, Raise),
            (Some(503), Raise, Raise),
            (Some(999), Raise, Raise),
            (None, Raise, Raise),
        ];
        for (status, unused, used) in table {
            let status = status.map(|status| StatusCode::from_u16(status).unwrap());
            assert_eq!(verdict(status, false), unused, "{status:?}");
            assert_eq!(verdict(status, true), used, "{status:?}");
        }
    }
}
