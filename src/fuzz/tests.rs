//! Runs the targets with random input: bytes, and strings that are nearly valid.

use proptest::{collection::vec, prelude::*};

use super::{header, idempotency_key, issuer_answer, issuer_body, redis_answer, token_keys};
use crate::{epochs::partition_of_name, problem::ProblemType};

/// Generates a JSON value of any type.
fn any_value() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("null".to_owned()),
        Just("true".to_owned()),
        Just("{}".to_owned()),
        any::<u64>().prop_map(|number| number.to_string()),
        "-?[0-9]{1,16}(\\.[0-9])?",
        "\"[A-Za-z0-9_-]{0,70}\"",
        "\"\\PC{0,10}\"",
    ]
}

/// Generates a member with a plausible value in four of five cases, and with any value otherwise.
fn member(name: &'static str) -> impl Strategy<Value = String> {
    let likely = match name {
        "owner" | "detail" | "field" | "resource" => "\"[a-z]{0,5}\"",
        "lease_id" => "\"[A-Za-z0-9_-]{22,64}\"",
        "new_token" => "true|false",
        _ => "[0-9]{1,15}",
    };
    prop_oneof![4 => likely.boxed(), 1 => any_value().boxed()]
        .prop_map(move |value| format!("\"{name}\":{value}"))
}

/// Generates an object with some of these members.
fn object(members: &'static [&'static str]) -> impl Strategy<Value = String> {
    vec(
        proptest::sample::select(members).prop_flat_map(member),
        0..5,
    )
    .prop_map(|members| format!("{{{}}}", members.join(",")))
}

const REQUEST: &[&str] = &[
    "ttl_ms",
    "wait_ms",
    "lock_delay_ms",
    "owner",
    "lease_id",
    "new_token",
    "at_least",
];

/// Generates a grant with all members, most of which are valid.
fn grant() -> impl Strategy<Value = String> {
    let field = prop_oneof![Just(String::new()), Just(r#"7;resource=\"a\""#.to_owned())];
    (field, "[A-Za-z0-9_-]{20,66}", "[a-c]{0,2}", 0..9_i64, any::<u64>()).prop_map(
        |(field, id, resource, token, ttl)| {
            format!(
                r#"{{"fencing_token":"{field}","lease_id":"{id}","resource":"{resource}","token":{token},"ttl_ms":{ttl},"held":true,"waiters":2,"owner":"w","leases":[{{"resource":"a","token":{token},"ttl_ms":{ttl},"waiters":0,"owner":null}}],"cursor":"0-0-"}}"#
            )
        },
    )
}

/// Generates a problem document of one of the known types.
fn problem() -> impl Strategy<Value = String> {
    let members = object(&["detail", "field", "retry_after_ms", "max_token", "resource"]);
    let refused = prop_oneof![
        members,
        (0..9, 0..9, any::<bool>()).prop_map(|(presented, max, by_floor)| format!(
            r#"{{"resource":"a","presented_token":{presented},"max_token":{max},"by_floor":{by_floor}}}"#
        ))
    ];
    (proptest::sample::select(ProblemType::ALL), refused).prop_map(|(kind, members)| {
        let separator = if members == "{}" { "" } else { "," };
        format!(r#"{{"type":"{}"{separator}{}"#, kind.uri(), &members[1..])
    })
}

/// Generates a reply of a Redis script that begins with a known word, or is a token.
fn redis_reply() -> impl Strategy<Value = String> {
    let first =
        "[0-9]{10,16}|granted|held|queued|displaced|released|lost|exhausted|epoch|behind|source";
    let word = prop_oneof![3 => "[0-9]{10,15}", 1 => "-?[0-9]{0,20}|1|\\PC{0,4}"];
    (first, vec(word, 0..4)).prop_map(|(first, words)| {
        let words = words.iter().map(|word| format!("\n{word}"));
        first + &words.collect::<String>()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]

    #[test]
    fn any_bytes_keep_all_promises(bytes in vec(any::<u8>(), 0..200)) {
        for target in [header, idempotency_key, issuer_answer, issuer_body, redis_answer, token_keys] {
            target(&bytes);
        }
    }

    #[test]
    fn token_field_parses_back(
        line in r#"([0-9]{1,16}(;(resource|key|mac|x)=("[a-c\\"]{0,3}"|%"[a-f%0-9]{0,6}"|:[A-D]{22}==:|[0-9])){0,3}[,\n] ?){1,3}[0-9]"#
    ) {
        header(line.as_bytes());
    }

    #[test]
    fn idempotency_key_parses_back(line in r#""[ -~]{0,260}"|"(\\"|\\\\|a){0,200}"(;x=1)?"#) {
        idempotency_key(line.as_bytes());
    }

    #[test]
    fn keys_for_tokens_are_not_shown(text in r"([a-c.]{0,2}:?([0-9a-fA-F]{60,80}|[a-g0-9]{66})[ \n]{1,2}){1,3}") {
        token_keys(text.as_bytes());
    }

    #[test]
    fn issuer_request_is_read_or_its_fault_is_named(body in object(REQUEST)) {
        issuer_body(body.as_bytes());
    }

    #[test]
    fn issuer_answer_parses_back(body in prop_oneof![grant(), problem()]) {
        issuer_answer(body.as_bytes());
    }

    #[test]
    fn redis_answer_is_parsed_or_refused(reply in redis_reply()) {
        redis_answer(reply.as_bytes());
    }

    #[test]
    fn key_of_another_program_is_not_a_lease(off_by in 0..2_u16, name in "\\PC{0,4}|[ab]{0,3}") {
        let partition = u16::from(partition_of_name(&name)) + off_by;
        redis_answer(format!("tower-fence:{{{partition}}}:lease:{name}").as_bytes());
    }
}

/// Checks that the strategies also generate valid input. Otherwise the tests would exercise little
/// more than the error paths.
#[test]
fn generated_inputs_include_valid_ones() {
    use proptest::{strategy::ValueTree, test_runner::TestRunner};

    use crate::{
        lease::{LeaseId, fuzz::is_granted},
        stale::StaleToken,
        wire::{AcquireBody, LeaseBody, refusal},
    };

    let mut runner = TestRunner::deterministic();
    let mut some = |texts: &dyn Fn(&mut TestRunner) -> String, valid: &dyn Fn(&[u8]) -> bool| {
        let found = (0..2_000).filter(|_| valid(texts(&mut runner).as_bytes()));
        assert!(found.count() > 5);
    };
    fn draw(strategy: impl Strategy<Value = String>) -> impl Fn(&mut TestRunner) -> String {
        move |runner| strategy.new_tree(runner).unwrap().current()
    }
    let resource = crate::Resource::new("a").unwrap();
    some(&draw(object(REQUEST)), &|body| {
        AcquireBody::read(body).is_ok_and(|body| body.owner.is_some())
    });
    some(&draw(object(REQUEST)), &|body| {
        AcquireBody::read(body).is_ok_and(|body| body.lease_id.is_some())
    });
    some(&draw(problem()), &|body| {
        refusal::read(body, Some(&resource)).is_some()
    });
    some(&draw(problem()), &|body| {
        StaleToken::from_response(http::StatusCode::PRECONDITION_FAILED, body).is_some()
    });
    some(&draw(redis_reply()), &is_granted);
    some(&draw(grant()), &|body| {
        serde_json::from_slice::<LeaseBody>(body).is_ok_and(|body| {
            let id = serde_json::to_value(&body).unwrap()["lease_id"]
                .as_str()
                .unwrap()
                .to_owned();
            LeaseId::new(id).is_ok()
        })
    });
}
