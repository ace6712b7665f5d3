//! A safe method with a token: everyone older is dead once it is answered, and nothing that was
//! read is overtaken by them.
//!
//! The handler runs without a transaction. Only when it has served the request, and has not turned it
//! away, the fence is raised; where another write came since the handler began, it reads once more.
//! See `Fence::look` and `Fence::raise_after`.

use std::future::poll_fn;

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{Request, request::Parts};
use tower_service::Service;

use super::{
    admitted, rejection::Rejection, resource::ResourceFrom, service::Config, verdict::turns_away,
};
use crate::fence::{AllAdmitted, Claims, FenceDatabase, ToRaise};

impl<DB: FenceDatabase, R: ResourceFrom> Config<DB, R> {
    /// Answers a fenced read.
    pub(super) async fn read<S>(
        &self,
        mut inner: S,
        mut parts: Parts,
        claims: Claims,
        body: Body,
    ) -> Result<Response, S::Error>
    where
        S: Service<Request<Body>> + Clone,
        S::Response: IntoResponse,
    {
        let (body, admitted, to_raise) = match self.prepare(&parts, &claims, body).await {
            Ok(prepared) => prepared,
            Err(rejection) => return Ok(rejection.into_response()),
        };
        parts.extensions.insert(admitted);
        let Some(to_raise) = to_raise else {
            admitted::for_read(&claims);
            let request = Request::from_parts(parts, Body::from(body));
            return Ok(inner.call(request).await?.into_response());
        };
        // Not ready yet, unlike the one that is called first.
        let mut again = inner.clone();
        let request = Request::from_parts(parts.clone(), Body::from(body.clone()));
        let response = inner.call(request).await?.into_response();
        if turns_away(response.status()) {
            return Ok(response);
        }
        match self.fence.raise_after(&claims, to_raise).await {
            Ok(unwritten) => {
                admitted::for_read(&claims);
                if unwritten {
                    return Ok(response);
                }
            }
            Err(error) => return Ok(Rejection::from(error).into_response()),
        }
        drop(response);
        poll_fn(|cx| again.poll_ready(cx)).await?;
        let request = Request::from_parts(parts, Body::from(body));
        Ok(again.call(request).await?.into_response())
    }

    /// Reads the body, which may be needed twice; then looks at the fence.
    async fn prepare(
        &self,
        parts: &Parts,
        claims: &Claims,
        body: Body,
    ) -> Result<(Bytes, AllAdmitted, Option<ToRaise>), Rejection> {
        let body = self.read_body(parts, body).await?;
        if let Some(unknown) = self.never_granted(claims).await? {
            return Err(unknown);
        }
        let (admitted, to_raise) = self.fence.look(claims).await?;
        Ok((body.to_bytes(), admitted, to_raise))
    }
}
