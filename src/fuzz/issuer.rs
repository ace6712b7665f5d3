//! Targets for the messages between an issuer and its clients.

use http::StatusCode;
use serde_json::{Value, from_slice, to_value, to_vec};

use super::assert_hidden;
use crate::{
    lease::{LeaseError, LeaseId, Page},
    problem::Problem,
    stale::StaleToken,
    token::Resource,
    wire::{
        AcquireBody, BreakBody, LeaseBody, PageBody, RenewBody, StateBody,
        refusal::{describe, problem_type, read},
    },
};

/// Parses the bodies of requests, as the issuer does.
pub fn issuer_body(bytes: &[u8]) {
    let secrets = lease_ids(bytes);
    match AcquireBody::read(bytes) {
        Ok(body) => {
            assert_eq!(AcquireBody::read(&to_vec(&body).unwrap()).unwrap(), body);
            let shown = AcquireBody {
                // The owner is not a secret, and may be the same text as a lease id.
                owner: None,
                ..body
            };
            assert_hidden(&secrets, &shown);
        }
        Err(error) => {
            let (field, detail) = parts(error);
            assert!(field.chars().count() <= 64 && !field.contains(char::is_control));
            assert_hidden(&secrets, &detail);
        }
    }
    match RenewBody::read(bytes) {
        Ok(body) => assert_eq!(RenewBody::read(&to_vec(&body).unwrap()).unwrap(), body),
        Err(error) => assert_hidden(&secrets, &parts(error).1),
    }
    if let Err(error) = BreakBody::read(bytes) {
        assert_hidden(&secrets, &parts(error).1);
    }
}

/// Returns the field and the detail of the refusal of a body.
fn parts(error: LeaseError) -> (String, String) {
    match error {
        LeaseError::Invalid { field, detail } => (field, detail),
        other => panic!("{other:?}"),
    }
}

/// Returns the strings in a body that have the form of a lease id, each of which may be a secret.
fn lease_ids(bytes: &[u8]) -> Vec<String> {
    let Ok(Value::Object(members)) = from_slice(bytes) else {
        return vec![];
    };
    let texts = members.values().filter_map(Value::as_str);
    texts
        .filter(|text| LeaseId::new(*text).is_ok())
        .map(str::to_owned)
        .collect()
}

/// Parses responses, as a client does: leases, states, pages and problem documents.
pub fn issuer_answer(bytes: &[u8]) {
    refusal(bytes);
    let _ = StaleToken::from_response(StatusCode::PRECONDITION_FAILED, bytes);
    lease(bytes);
    if let Ok(state) = from_slice::<StateBody>(bytes)
        && let (written, Ok(Some(held))) = (to_value(&state).unwrap(), state.into_held())
    {
        let resource = serde_json::from_value(written["resource"].clone()).unwrap();
        let written = to_vec(&StateBody::new(&resource, Some(&held))).unwrap();
        let again: StateBody = from_slice(&written).unwrap();
        assert_eq!(again.into_held(), Ok(Some(held)));
    }
    if let Ok(page) = from_slice::<PageBody>(bytes).map(Page::from) {
        let again: PageBody = from_slice(&to_vec(&PageBody::from(&page)).unwrap()).unwrap();
        assert_eq!(Page::from(again), page);
    }
}

/// Checks that a refusal stays the same when an issuer writes it again.
fn refusal(bytes: &[u8]) {
    let resource = Resource::new("sku-1").unwrap();
    let Some(error) = read(bytes, Some(&resource)) else {
        return;
    };
    assert!(!matches!(error, LeaseError::Unavailable(_)));
    let mut problem = Problem::new(problem_type(&error));
    if let LeaseError::Invalid { detail, .. } = &error {
        problem = problem.detail(detail);
    }
    if let LeaseError::Misconfigured(cause) = &error {
        problem = problem.detail(cause.to_string());
    }
    let again = read(
        &to_vec(&describe(problem, &error)).unwrap(),
        Some(&resource),
    );
    assert_eq!(format!("{:?}", again.unwrap()), format!("{error:?}"));
}

/// Checks that a lease is accepted only for its own resource and lease id.
fn lease(bytes: &[u8]) {
    let read = || from_slice::<LeaseBody>(bytes).ok();
    let Some(written) = read().map(|body| to_value(body).unwrap()) else {
        return;
    };
    let resource: Resource = serde_json::from_value(written["resource"].clone()).unwrap();
    let text = written["lease_id"].as_str().unwrap().to_owned();
    assert!(
        read()
            .unwrap()
            .into_lease(&resource, LeaseId::random())
            .is_none()
    );
    let Ok(id) = LeaseId::new(text) else {
        return;
    };
    let lease = read().unwrap().into_lease(&resource, id.clone()).unwrap();
    let field = lease.fencing_token();
    assert_eq!(
        (field.token, field.resource),
        (lease.token, Some(resource.clone()))
    );
    if !resource.as_str().contains(id.expose()) {
        assert_hidden(&[id.expose().to_owned()], &lease.id);
    }
    let again: LeaseBody = from_slice(&to_vec(&LeaseBody::from(&lease)).unwrap()).unwrap();
    assert_eq!(again.into_lease(&resource, id), Some(lease));
}
