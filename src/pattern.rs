//! [`ResourcePattern`]: resource names with parameters.

use std::{fmt, str::FromStr, sync::Arc};

use crate::token::{InvalidResource, Resource};

/// Pattern for the names of resources, such as `show/{show_id}/seat/{seat}`.
///
/// 1. A pattern is text with parameters in braces. Each parameter has a unique name of letters,
///    digits, `_` and `-`.
/// 2. [`fill`](Self::fill) replaces each parameter with its value. Values are neither encoded nor
///    trimmed, so an SQL expression can produce the same name: `concat('show/', show_id, '/seat/',
///    seat)`.
/// 3. Two parameters are always separated by text. The value of each parameter except the last must
///    not contain the character that follows the parameter in the pattern. Different values
///    therefore always result in different names.
///
/// The layer ([`FenceLayer::new`](crate::FenceLayer::new)) fills the pattern from path parameters,
/// and a holder fills it from its own values.
///
/// # Example
///
/// ```
/// use tower_fence::ResourcePattern;
///
/// let seats = ResourcePattern::new("show/{show_id}/seat/{seat}")?;
/// let seat = seats.fill([("show_id", "7"), ("seat", "A/12")])?;
/// assert_eq!(seat.as_str(), "show/7/seat/A/12");
/// // A `/` ends the value of `show_id`.
/// assert!(seats.fill([("show_id", "7/seat/A"), ("seat", "12")]).is_err());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Rows that violate rule 3
///
/// `fill` refuses values that violate rule 3. A protected table may still contain such values,
/// because SQL computes the names of its rows and does not check rule 3. Two rows with such values
/// may belong to the same resource. Writers of the two rows exclude each other, and a stale writer
/// is refused as usual. To prevent shared names, add a constraint on the column:
/// `CHECK (position('/' in show_id) = 0)`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct ResourcePattern {
    /// The text before the first parameter.
    start: Arc<str>,
    parameters: Arc<[Parameter]>,
}

/// Parameter of a pattern, with the text that follows it.
#[derive(PartialEq, Eq, Hash)]
struct Parameter {
    name: String,
    /// The text from this parameter to the next parameter or to the end.
    after: String,
}

impl ResourcePattern {
    /// Parses a pattern. A pattern without parameters always results in the same name.
    ///
    /// # Errors
    ///
    /// Returns an [`InvalidPattern`] for the first rule that the text violates.
    pub fn new(pattern: impl AsRef<str>) -> Result<Self, InvalidPattern> {
        let pattern = pattern.as_ref();
        if pattern.is_empty() {
            return Err(InvalidPattern::Empty);
        }
        let (start, mut rest) = literal(pattern, pattern)?;
        let mut parameters: Vec<Parameter> = Vec::new();
        while let Some(opened) = rest.strip_prefix('{') {
            let unbalanced = || unbalanced(pattern, rest);
            let (name, after) = opened.split_once('}').ok_or_else(unbalanced)?;
            if name.contains('{') {
                return Err(unbalanced());
            }
            check_name(name)?;
            if parameters.iter().any(|parameter| parameter.name == name) {
                return Err(InvalidPattern::Twice(name.to_owned()));
            }
            if parameters.last().is_some_and(|last| last.after.is_empty()) {
                return Err(InvalidPattern::Adjacent(name.to_owned()));
            }
            let (after, next) = literal(pattern, after)?;
            rest = next;
            parameters.push(Parameter {
                name: name.to_owned(),
                after: after.to_owned(),
            });
        }
        let literals = parameters.iter().map(|parameter| parameter.after.len());
        let bytes = start.len() + literals.sum::<usize>();
        if bytes > Resource::MAX_BYTES {
            return Err(InvalidPattern::TooLong { bytes });
        }
        Ok(Self {
            start: start.into(),
            parameters: parameters.into(),
        })
    }

    /// Returns the names of the parameters, in order.
    pub fn parameters(&self) -> impl ExactSizeIterator<Item = &str> {
        self.parameters
            .iter()
            .map(|parameter| parameter.name.as_str())
    }

    /// Returns the resource whose name is the pattern with the values in place of the parameters.
    ///
    /// # Errors
    ///
    /// Returns a [`FillError`] if a value is missing, belongs to an unknown parameter, or violates
    /// rule 3, or if the result is not a valid [`Resource`].
    pub fn fill<N, V>(
        &self,
        values: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Resource, FillError>
    where
        N: AsRef<str>,
        V: fmt::Display,
    {
        let mut filled = vec![None; self.parameters.len()];
        for (name, value) in values {
            let name = name.as_ref();
            let place = self.parameters().position(|parameter| parameter == name);
            let place = place.ok_or_else(|| FillError::Unknown(name.to_owned()))?;
            if filled[place].replace(value.to_string()).is_some() {
                return Err(FillError::Twice(name.to_owned()));
            }
        }
        let mut resource = String::from(&*self.start);
        let last = self.parameters.len().saturating_sub(1);
        for (place, (parameter, value)) in self.parameters.iter().zip(filled).enumerate() {
            let name = || parameter.name.clone();
            let value = value.ok_or_else(|| FillError::Missing(name()))?;
            if let Some(separator) = parameter.after.chars().next()
                && place < last
                && value.contains(separator)
            {
                let parameter = name();
                return Err(FillError::Separator {
                    parameter,
                    separator,
                });
            }
            resource.push_str(&value);
            resource.push_str(&parameter.after);
        }
        Ok(Resource::new(resource)?)
    }
}

/// Splits the text before the next parameter from the rest.
fn literal<'a>(pattern: &str, rest: &'a str) -> Result<(&'a str, &'a str), InvalidPattern> {
    let (literal, rest) = rest.split_at(rest.find(['{', '}']).unwrap_or(rest.len()));
    if rest.starts_with('}') {
        return Err(unbalanced(pattern, rest));
    }
    if literal.chars().any(char::is_control) {
        return Err(InvalidPattern::ControlCharacter);
    }
    Ok((literal, rest))
}

fn check_name(name: &str) -> Result<(), InvalidPattern> {
    let allowed = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
    if name.is_empty() || !name.chars().all(allowed) {
        return Err(InvalidPattern::Name(name.to_owned()));
    }
    Ok(())
}

/// Returns the error for the unmatched brace at the start of `rest`.
fn unbalanced(pattern: &str, rest: &str) -> InvalidPattern {
    InvalidPattern::Unbalanced {
        position: pattern.len() - rest.len(),
    }
}

impl FromStr for ResourcePattern {
    type Err = InvalidPattern;

    fn from_str(pattern: &str) -> Result<Self, Self::Err> {
        Self::new(pattern)
    }
}

/// Formats the pattern as it was parsed.
impl fmt::Display for ResourcePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.start)?;
        for Parameter { name, after } in &*self.parameters {
            write!(f, "{{{name}}}{after}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for ResourcePattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ResourcePattern({:?})", self.to_string())
    }
}

/// Error returned for text that is not a valid [`ResourcePattern`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InvalidPattern {
    /// The text is empty.
    #[error("a resource pattern cannot be empty")]
    Empty,
    /// A brace is unmatched, or is inside another pair.
    #[error("unmatched brace at byte {position} of the resource pattern")]
    Unbalanced {
        /// The position of the brace, in bytes from the start.
        position: usize,
    },
    /// The name of a parameter is invalid.
    #[error("the name of a parameter must consist of letters, digits, `_` and `-`, not `{0}`")]
    Name(String),
    /// Two parameters have the same name.
    #[error("the resource pattern has the parameter `{0}` twice")]
    Twice(String),
    /// Two parameters are not separated by text.
    #[error("the resource pattern needs text between the parameter `{0}` and the one before it")]
    Adjacent(String),
    /// The text of the pattern, without its parameters, is longer than a name can be.
    #[error(
        "the text of a resource pattern must have at most 255 bytes without its parameters, not {bytes}"
    )]
    TooLong {
        /// The length of that text, in bytes.
        bytes: usize,
    },
    /// The text contains a control character.
    #[error("a resource pattern must not contain control characters")]
    ControlCharacter,
}

/// Error returned when a [`ResourcePattern`] cannot be filled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FillError {
    /// A parameter has no value.
    #[error("the parameter `{0}` of the resource pattern has no value")]
    Missing(String),
    /// A value belongs to an unknown parameter.
    #[error("the resource pattern has no parameter `{0}`")]
    Unknown(String),
    /// A parameter has two values.
    #[error("the parameter `{0}` of the resource pattern has two values")]
    Twice(String),
    /// A value contains the character that follows its parameter.
    #[error("the parameter `{parameter}` cannot contain `{separator}`")]
    Separator {
        /// The parameter.
        parameter: String,
        /// The character that follows the parameter in the pattern.
        separator: char,
    },
    /// The result is not a valid name.
    #[error(transparent)]
    Resource(#[from] InvalidResource),
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn pattern(text: &str) -> ResourcePattern {
        text.parse().unwrap()
    }

    #[test]
    fn a_pattern_is_filled_by_name() {
        let seats = pattern("show/{show_id}/seat/{seat}");
        assert!(seats.parameters().eq(["show_id", "seat"]));
        let seat = seats.fill([("seat", "A/{12}"), ("show_id", "7")]).unwrap();
        assert_eq!(seat.as_str(), "show/7/seat/A/{12}");
        assert_eq!(
            pattern("{id}.json").fill([("id", 7)]).unwrap().as_str(),
            "7.json"
        );
        let none: [(&str, &str); 0] = [];
        assert_eq!(pattern("settings").fill(none).unwrap().as_str(), "settings");
    }

    #[test]
    fn each_invalid_pattern_has_its_error() {
        use InvalidPattern as E;
        let long = "x".repeat(256);
        for (text, error) in [
            ("", E::Empty),
            ("a/{b", E::Unbalanced { position: 2 }),
            ("a/b}", E::Unbalanced { position: 3 }),
            ("{a}b}", E::Unbalanced { position: 4 }),
            ("{a{b}}", E::Unbalanced { position: 0 }),
            ("a/{}", E::Name("".into())),
            ("a/{*rest}", E::Name("*rest".into())),
            ("{a}/{b}/{a}", E::Twice("a".into())),
            ("{a}{b}", E::Adjacent("b".into())),
            ("a\n{b}", E::ControlCharacter),
            (&long, E::TooLong { bytes: 256 }),
        ] {
            assert_eq!(ResourcePattern::new(text), Err(error), "{text}");
        }
        assert!(ResourcePattern::new("x".repeat(255)).is_ok());
    }

    #[test]
    fn each_invalid_filling_has_its_error() {
        use FillError as E;
        let seats = pattern("{show}/{seat}");
        let filled = |values: &[(&str, &str)]| seats.fill(values.iter().copied()).unwrap_err();
        assert_eq!(filled(&[("show", "7")]), E::Missing("seat".into()));
        assert_eq!(filled(&[("row", "7")]), E::Unknown("row".into()));
        assert_eq!(
            filled(&[("show", "7"), ("show", "7")]),
            E::Twice("show".into())
        );
        let separator = E::Separator {
            parameter: "show".into(),
            separator: '/',
        };
        assert_eq!(filled(&[("show", "7/A"), ("seat", "12")]), separator);
        let long = "x".repeat(254);
        let bytes = InvalidResource::TooLong { bytes: 256 };
        assert_eq!(filled(&[("show", "7"), ("seat", &long)]), bytes.into());
        let control = InvalidResource::ControlCharacter;
        assert_eq!(filled(&[("show", "\n"), ("seat", "a")]), control.into());
        assert_eq!(
            pattern("{id}").fill([("id", "")]),
            Err(InvalidResource::Empty.into())
        );
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn parsed_pattern_is_written_unchanged(text in "[a{}/*é]{0,12}") {
            if let Ok(pattern) = ResourcePattern::new(&text) {
                prop_assert_eq!(pattern.to_string(), text);
            }
        }

        /// The texts and values use an alphabet of two characters, so that they often contain each
        /// other.
        #[test]
        fn two_different_fillings_never_give_one_name(
            texts in vec("[ab]{1,3}", 4),
            one in vec("[ab]{0,4}", 3),
            other in vec("[ab]{0,4}", 3),
        ) {
            let [start, first, second, end] = &texts[..] else { unreachable!() };
            let pattern = pattern(&format!("{start}{{x}}{first}{{y}}{second}{{z}}{end}"));
            let fill = |values: &[String]| pattern.fill(["x", "y", "z"].iter().zip(values));
            if let (Ok(a), Ok(b)) = (fill(&one), fill(&other)) {
                prop_assert_eq!(a == b, one == other);
            }
        }
    }
}
