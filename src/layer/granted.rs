//! Tokens of an issuer that is not this crate's, up to the highest one that it has granted.

use std::{error::Error, sync::Arc, time::Duration};

use axum::BoxError;
use futures_util::future::BoxFuture;
use tokio::time::timeout;

use super::{FenceLayer, rejection::Rejection, resource::ResourceFrom};
use crate::{
    fence::{Claims, FenceDatabase, HighMark},
    token::Token,
};

/// What the issuer has granted, as far as it is known, and how it is asked for more.
pub(super) struct GrantedTokens {
    highest: Box<dyn Fn() -> BoxFuture<'static, Result<Token, BoxError>> + Send + Sync>,
    known: HighMark<Rejection>,
}

impl GrantedTokens {
    /// Finds the first token that was never granted. The issuer is asked for no longer than `answer_wait`.
    pub(super) async fn check(
        &self,
        claims: &Claims,
        answer_wait: Duration,
    ) -> Result<Option<Rejection>, Rejection> {
        for claim in claims.iter() {
            let look = async || {
                let answer = timeout(answer_wait, (self.highest)()).await;
                let highest = answer.unwrap_or_else(|elapsed| Err(elapsed.into()));
                let unknown = |error: BoxError| {
                    Rejection::IssuerUnavailable(Arc::<dyn Error + Send + Sync>::from(error))
                };
                highest.map(Token::get).map_err(unknown)
            };
            if !self.known.has(claim.token.get(), look).await? {
                return Ok(Some(Rejection::NeverGranted(claim.clone())));
            }
        }
        Ok(None)
    }
}

impl<DB: FenceDatabase, R: ResourceFrom> FenceLayer<DB, R> {
    /// Refuses tokens above the highest one that their issuer has granted, with 403 `unknown-epoch`; `highest` asks it.
    /// Default: any integer counts, whichever issuer made it.
    ///
    /// For tokens of [other lock servers](crate::guide#25-tokens-of-other-lock-servers) whose numbers grow over all
    /// resources (etcd, ZooKeeper, Consul's index, a sequence). For this crate's own there is
    /// [`issued_by_this_database`](Self::issued_by_this_database); with both, a token has to pass both.
    ///
    /// ```
    /// # use tower_fence::{Fence, FenceLayer, PathParam, Token};
    /// # async fn current_revision() -> Result<i64, std::io::Error> { Ok(4711) }
    /// # fn layer(fence: Fence<sqlx::Postgres>) -> impl Clone {
    /// FenceLayer::new(fence, PathParam("sku")).granted_up_to(async || {
    ///     // The revision in the header of a linearizable read of etcd.
    ///     Ok(Token::new(current_revision().await?)?)
    /// })
    /// # }
    /// ```
    ///
    /// **What it gives**: a number out of the blue, and a higher one of another issuer, closes no resource: it is refused before
    /// the database is asked. What passes is at most as high as the last grant, so that the next one outranks it.
    ///
    /// **What it does not**: tell whose a token is that is not higher. Who guesses one between the resource's last token and
    /// the highest of all is let in, and so is a lower one of another issuer that is still above the fence.
    /// [Signed tokens](Self::verify_with) keep both out.
    ///
    /// `highest` must not answer less than what was granted before it was called, or new holders are refused: read
    /// linearizably. Too high an answer only loosens the bound. What it has answered is remembered, by this layer and its
    /// clones, and only a token above that makes the layer ask: mostly the first write after each grant. Many who wait share an answer,
    /// and after one that did not help the next question comes a second later. It has as long as the database,
    /// [`answer_wait`](crate::Fence::answer_wait). Where it fails, the answer is 503 `store-unavailable`, for tokens
    /// above what is known.
    #[must_use]
    pub fn granted_up_to<F, Fut>(mut self, highest: F) -> Self
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Token, BoxError>> + Send + 'static,
    {
        self.config.granted = Some(Arc::new(GrantedTokens {
            highest: Box::new(move || Box::pin(highest())),
            known: HighMark::default(),
        }));
        self
    }
}
