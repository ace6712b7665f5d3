//! Code that is broken by a small change. The traces must detect the change.

use std::{borrow::Cow, panic::AssertUnwindSafe};

use futures_util::FutureExt;

use super::walk::HAS_FAILED;

/// A snippet of the code, and its replacement.
#[derive(Clone, Copy)]
pub struct Change {
    pub text: &'static str,
    pub by: &'static str,
}

impl Change {
    /// Returns the code with the change, if it contains the text.
    pub fn applied(self, whole: &str) -> Cow<'_, str> {
        match whole.contains(self.text) {
            true => whole.replace(self.text, self.by).into(),
            false => whole.into(),
        }
    }

    /// Runs traces. A comparison in one of their walks must fail.
    pub async fn is_found(self, traces: impl Future<Output = ()>) {
        let Self { text, by } = self;
        HAS_FAILED.set(false);
        let failed = AssertUnwindSafe(traces).catch_unwind().await;
        let why = failed.expect_err(&format!("no trace failed with `{by}` for `{text}`"));
        let why = match why.downcast::<String>() {
            Ok(why) => *why,
            Err(why) => (*why
                .downcast::<&str>()
                .expect("the message of a panic is a string"))
            .to_owned(),
        };
        // A failed `unwrap` means that the changed code does not run at all, which proves nothing.
        let is_found = HAS_FAILED.take() && !why.contains("unwrap()");
        assert!(is_found, "`{by}` for `{text}`: {why}");
    }
}
