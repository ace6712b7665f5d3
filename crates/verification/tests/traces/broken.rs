//! What is broken by a few letters, and found by the traces.

use std::{borrow::Cow, panic::AssertUnwindSafe};

use futures_util::FutureExt;

/// A text that stands in the code, and what is there instead.
#[derive(Clone, Copy)]
pub struct Change {
    pub text: &'static str,
    pub by: &'static str,
}

impl Change {
    /// A whole that it may concern.
    pub fn applied(self, whole: &str) -> Cow<'_, str> {
        match whole.contains(self.text) {
            true => whole.replace(self.text, self.by).into(),
            false => whole.into(),
        }
    }

    /// Runs traces that have to fail by a comparison, and to say this.
    pub async fn is_found(self, traces: impl Future<Output = ()>, told: &str) {
        let Self { text, by } = self;
        let failed = AssertUnwindSafe(traces).catch_unwind().await;
        let why = failed.expect_err(&format!("nothing was found with `{by}` for `{text}`"));
        let why = match why.downcast::<String>() {
            Ok(why) => *why,
            Err(why) => (*why.downcast::<&str>().expect("a text")).to_owned(),
        };
        // What does not run at all says little.
        let is_found = why.contains(told) && !why.contains("unwrap()");
        assert!(is_found, "`{by}` for `{text}`: {why}");
    }
}
