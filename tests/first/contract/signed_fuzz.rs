//! Property tests of signed fields that were changed.

use proptest::{collection::vec, prelude::*};
use tower_fence::{
    Resource, Token, TokenKey, TokenKeys,
    header::{self, FencingToken},
    token_keys::KeyId,
};

const SECRET: [u8; 32] = [7; 32];

fn keys() -> TokenKeys {
    let key = |id: &str, secret: [u8; 32]| TokenKey::new(KeyId::new(id).unwrap(), secret).unwrap();
    TokenKeys::new([key("k1", SECRET), key("k2", [8; 32])]).unwrap()
}

/// Returns the resources and tokens of a field if they are signed with these keys.
fn verified(field: &[u8], keys: &TokenKeys) -> Option<Vec<(Resource, Token)>> {
    let tokens = header::parse([field]).ok()?;
    let verified = tokens.into_iter().map(|token| {
        let resource = keys.verify(&token).ok()?;
        Some((resource.clone(), token.token))
    });
    verified.collect()
}

prop_compose! {
    fn any_grant()(name in "\\PC{1,60}", token in 1..=Token::MAX.get()) -> (Resource, Token) {
        (Resource::new(name).unwrap(), Token::new(token).unwrap())
    }
}

fn flip(bytes: &[u8], bit: usize) -> Vec<u8> {
    let mut flipped = bytes.to_vec();
    flipped[bit / 8] ^= 1 << (bit % 8);
    flipped
}

proptest! {
    #[test]
    fn no_bit_of_a_field_can_be_changed((resource, token) in any_grant()) {
        let keys = keys();
        let field = keys.sign(&resource, token).to_string();
        let granted = vec![(resource, token)];
        prop_assert_eq!(verified(field.as_bytes(), &keys), Some(granted.clone()));
        let mut refused = 0;
        for bit in 0..field.len() * 8 {
            match verified(&flip(field.as_bytes(), bit), &keys) {
                None => refused += 1,
                // The change has created another encoding of the same field. For example, the last
                // character of a MAC has four unused bits.
                Some(same) => prop_assert_eq!(&same, &granted, "bit {}", bit),
            }
        }
        prop_assert!(refused > field.len() * 8 - 40, "{} of {}", refused, field.len() * 8);
    }

    #[test]
    fn no_bit_of_any_part_can_be_changed((resource, token) in any_grant(), bit in 0..63_u32) {
        let keys = keys().audience("shop");
        let signed = keys.sign(&resource, token);
        let (id, mac) = (signed.key.clone().unwrap(), signed.mac.clone().unwrap());
        let check = |resource: &Resource, token: Token, id: &KeyId, mac: &[u8]| {
            let mut field = FencingToken::new(token).with_resource(resource.clone());
            (field.key, field.mac) = (Some(id.clone()), Some(mac.to_vec().into()));
            verified(field.to_string().as_bytes(), &keys).is_some()
        };
        prop_assert!(check(&resource, token, &id, &mac));
        for bit in 0..128 {
            prop_assert!(!check(&resource, token, &id, &flip(&mac, bit)));
        }
        for length in (0..16).chain(17..64) {
            let other: Vec<u8> = mac.iter().copied().cycle().take(length).collect();
            prop_assert!(!check(&resource, token, &id, &other));
        }
        if let Ok(other) = Token::new(token.get() ^ (1 << bit)) {
            prop_assert!(!check(&resource, other, &id, &mac));
        }
        let name = resource.as_str().as_bytes();
        for bit in 0..name.len() * 8 {
            let other = String::from_utf8(flip(name, bit)).ok();
            if let Some(other) = other.and_then(|name| Resource::new(name).ok()) {
                prop_assert!(!check(&other, token, &id, &mac));
            }
        }
        prop_assert!(!check(&resource, token, &KeyId::new("k2").unwrap(), &mac));
        prop_assert!(!check(&resource, token, &KeyId::new("k3").unwrap(), &mac));
        let field = signed.to_string();
        prop_assert!(verified(field.as_bytes(), &keys.clone().audience("shoq")).is_none());
        prop_assert!(verified(field.as_bytes(), &keys.clone().audience("")).is_none());
    }

    /// Each text is preceded by its length, so no part of one text can become a part of the next.
    #[test]
    fn bytes_moved_between_parts_are_detected(
        audience in "[a-z]{1,8}", name in "[a-z]{1,8}", token in 1..=Token::MAX.get()
    ) {
        let token = Token::new(token).unwrap();
        let whole = format!("{audience}{name}");
        let of = |cut: usize| {
            let (audience, name) = whole.split_at(cut);
            let keys = keys().audience(audience);
            keys.sign(&Resource::new(name).unwrap(), token).mac
        };
        let mut macs: Vec<_> = (0..whole.len()).map(of).collect();
        macs.sort_unstable();
        macs.dedup();
        prop_assert_eq!(macs.len(), whole.len());
    }

    #[test]
    fn truncated_doubled_and_swapped_parameters_are_refused((resource, token) in any_grant(), (other, later) in any_grant()) {
        prop_assume!(resource != other);
        let keys = keys();
        let [one, two] = [(&resource, token), (&other, later)].map(|(name, token)| keys.sign(name, token).to_string());
        for end in (0..one.len()).filter(|end| one.is_char_boundary(*end)) {
            let cut = verified(&one.as_bytes()[..end], &keys);
            prop_assert!(cut.is_none_or(|found| found.is_empty()), "{}", &one[..end]);
        }
        let both = format!("{one}, {two}");
        let granted = vec![(resource.clone(), token), (other.clone(), later)];
        prop_assert_eq!(verified(both.as_bytes(), &keys), Some(granted.clone()));
        let mac = |field: &str| field[field.find(";mac=").unwrap()..].to_owned();
        let swapped = format!("{}, {}", one.replace(&mac(&one), &mac(&two)), two.replace(&mac(&two), &mac(&one)));
        prop_assert_eq!(verified(swapped.as_bytes(), &keys), None);
        // If a parameter is repeated, RFC 9651 uses the last one, so the last one is verified.
        let doubled = format!("{one}{}", mac(&two));
        prop_assert_eq!(verified(doubled.as_bytes(), &keys), None);
        let healed = format!("{doubled}{}", mac(&one));
        prop_assert_eq!(verified(healed.as_bytes(), &keys), Some(granted[..1].to_vec()));
    }

    #[test]
    fn no_input_panics_and_unsigned_tokens_are_not_verified(
        field in vec(any::<u8>(), 0..120),
        near in r#"[0-9]{1,16};resource="[a-c]{0,3}";key="[a-k0-9.]{0,70}";mac=:[A-Za-z0-9+/]{0,46}={0,2}:"#,
    ) {
        let keys = keys();
        for field in [field, near.into_bytes()] {
            let found = verified(&field, &keys);
            prop_assert!(found.is_none_or(|found| found.is_empty()));
        }
    }
}
