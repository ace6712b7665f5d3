//! Reading of keys from text, a file or the environment.

use std::{
    env, fs,
    path::{Path, PathBuf},
    str::{self, FromStr},
};

use zeroize::Zeroizing;

use super::{
    error::{InvalidTokenKeys, TokenKeysError},
    key::TokenKey,
    keys::TokenKeys,
};

/// Parses keys of the form `ID:SECRET`, separated by white space. Each secret consists of
/// hexadecimal digits. The first key signs. `openssl rand -hex 32` generates a secret.
impl FromStr for TokenKeys {
    type Err = InvalidTokenKeys;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let keys = text.split_whitespace().map(|entry| {
            let (id, digits) = entry.split_once(':').ok_or(InvalidTokenKeys::NoId)?;
            TokenKey::new(id, bytes(digits)?.as_slice())
        });
        Self::new(keys.collect::<Result<Vec<_>, InvalidTokenKeys>>()?)
    }
}

fn bytes(digits: &str) -> Result<Zeroizing<Vec<u8>>, InvalidTokenKeys> {
    // With this capacity, the vector is never reallocated. A reallocation would leave a copy of the
    // secret in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    for pair in digits.as_bytes().chunks(2) {
        let value = |digit: u8| char::from(digit).to_digit(16);
        let &[high, low] = pair else {
            return Err(InvalidTokenKeys::NotHexadecimal);
        };
        let (Some(high), Some(low)) = (value(high), value(low)) else {
            return Err(InvalidTokenKeys::NotHexadecimal);
        };
        // The value is at most 255, so the cast does not truncate.
        bytes.push((high * 16 + low) as u8);
    }
    Ok(bytes)
}

impl TokenKeys {
    /// Reads keys from a file, in the format of [`FromStr`](#impl-FromStr-for-TokenKeys).
    ///
    /// To rotate keys, read the file again and [`replace`](Self::replace) the keys in use.
    ///
    /// # Errors
    ///
    /// - [`TokenKeysError::File`] if the file cannot be read.
    /// - [`TokenKeysError::Invalid`] if its text is not a valid set of keys.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, TokenKeysError> {
        let path = path.as_ref();
        let text = fs::read(path).map(Zeroizing::new);
        let text = text.map_err(|error| TokenKeysError::File(path.into(), error))?;
        Ok(parse(&text)?)
    }

    /// Reads keys from the environment variable `name`, or from a file. The path of the file is in
    /// the variable `name` with the suffix `_FILE`.
    ///
    /// Returns `None` if neither variable is set. An empty variable counts as unset.
    ///
    /// Prefer a file. The environment of a process cannot be wiped, and users that may inspect the
    /// process can read it.
    ///
    /// # Errors
    ///
    /// - [`TokenKeysError::Twice`] if both variables are set.
    /// - [`TokenKeysError::File`] if the file cannot be read.
    /// - [`TokenKeysError::Invalid`] if the text is not a valid set of keys.
    pub fn from_env(name: &str) -> Result<Option<Self>, TokenKeysError> {
        let read = |name: &str| env::var_os(name).filter(|value| !value.is_empty());
        match (read(name), read(&format!("{name}_FILE"))) {
            (None, None) => Ok(None),
            (Some(_), Some(_)) => Err(TokenKeysError::Twice(name.into())),
            (None, Some(file)) => Self::from_file(PathBuf::from(file)).map(Some),
            (Some(text), None) => {
                let text = Zeroizing::new(text.into_encoded_bytes());
                Ok(Some(parse(&text)?))
            }
        }
    }
}

fn parse(text: &[u8]) -> Result<TokenKeys, InvalidTokenKeys> {
    let text = str::from_utf8(text).map_err(|_| InvalidTokenKeys::NoId)?;
    text.parse()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        key_id::{InvalidKeyId, KeyId},
        token::{Resource, Token},
    };

    const SECRET: &str = "00112233445566778899aabbccddeeff00112233445566778899AABBCCDDEEFF";

    fn refused(text: &str) -> InvalidTokenKeys {
        text.parse::<TokenKeys>().unwrap_err()
    }

    #[test]
    fn a_text_has_keys_and_the_first_one_signs() {
        let other = "ff".repeat(40);
        let keys: TokenKeys = format!("\n k2:{SECRET}\tk1:{other}\r\n").parse().unwrap();
        let ids = keys.ids();
        assert_eq!(
            ids.iter().map(KeyId::as_str).collect::<Vec<_>>(),
            ["k2", "k1"]
        );
        let key = TokenKey::new(&ids[0], bytes(SECRET).unwrap().as_slice()).unwrap();
        let alone = TokenKeys::new([key]).unwrap();
        let sku = Resource::new("sku-1").unwrap();
        assert_eq!(keys.sign(&sku, Token::MAX), alone.sign(&sku, Token::MAX));
    }

    #[test]
    fn two_digits_are_a_byte() {
        assert_eq!(*bytes("00017f80FFfe").unwrap(), [0, 1, 127, 128, 255, 254]);
    }

    #[test]
    fn errors_do_not_contain_the_secret() {
        use InvalidTokenKeys as E;
        for (text, error) in [
            ("", E::None),
            (" \n", E::None),
            (SECRET, E::NoId),
            (&format!(":{SECRET}"), E::Id(InvalidKeyId)),
            (&format!("a,b:{SECRET}"), E::Id(InvalidKeyId)),
            (&format!("k1:{SECRET}0"), E::NotHexadecimal),
            (&format!("k1:{SECRET}+1"), E::NotHexadecimal),
            (&format!("k1:{SECRET}é"), E::NotHexadecimal),
            (&format!("k1:0x{SECRET}"), E::NotHexadecimal),
            ("k1:", E::Short { bytes: 0 }),
            (&format!("k1:{}", &SECRET[2..]), E::Short { bytes: 31 }),
            (
                &format!("k1:{SECRET} k1:{SECRET}"),
                E::SameId(KeyId::new("k1").unwrap()),
            ),
        ] {
            assert_eq!(refused(text), error, "{text}");
            let shown = format!("{error} {error:?}");
            assert!(!shown.contains(&SECRET[..6]), "{shown}");
        }
    }

    #[test]
    fn key_file_is_read_and_its_errors_are_reported() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        let missing = TokenKeys::from_file(&file).unwrap_err();
        assert!(matches!(&missing, TokenKeysError::File(path, _) if *path == file));
        fs::write(&file, format!("k1:{SECRET}\n")).unwrap();
        assert_eq!(TokenKeys::from_file(&file).unwrap().ids()[0].as_str(), "k1");
        fs::write(&file, b"k1:\xff\xfe").unwrap();
        let invalid = TokenKeys::from_file(&file).unwrap_err();
        assert!(matches!(
            invalid,
            TokenKeysError::Invalid(InvalidTokenKeys::NoId)
        ));
        assert!(
            TokenKeys::from_env("TOWER_FENCE_NO_SUCH_VARIABLE")
                .unwrap()
                .is_none()
        );
    }
}
