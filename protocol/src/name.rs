//! Names of topics, tensors and readers, validated once when parsed.

use std::{fmt, str::FromStr};

/// The maximum length of a topic, tensor name or glob, in bytes.
pub(crate) const NAME_MAX_BYTES: usize = 255;

/// The name of a stream of versions, e.g. `policy` or `kv/req-17`.
///
/// One or more segments joined by `/`, each of `A-Z a-z 0-9 . _ -` and neither `.` nor `..`, at most 255 bytes in all.
/// The alphabet is small because a topic is also part of a URL (the ticket) and of a path (where `subscribe --out`
/// writes), and must not change the meaning of either.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Topic(Box<str>);

impl Topic {
    /// Parses `name`.
    ///
    /// # Errors
    /// [`NameError`] names the rule that `name` breaks.
    pub fn new(name: &str) -> Result<Self, NameError> {
        check_length(name)?;
        for segment in name.split('/') {
            match segment {
                "" => return Err(NameError::EmptySegment(name.into())),
                "." | ".." => return Err(NameError::DotSegment(name.into())),
                _ => {}
            }
            if let Some(found) = segment.chars().find(|c| !is_topic_char(*c)) {
                return Err(NameError::ForbiddenChar { name: name.into(), found });
            }
        }
        Ok(Self(name.into()))
    }
}

/// The name of one tensor in a snapshot, e.g. `model.layers.0.mlp.up_proj.weight`.
///
/// Any UTF-8 text of 1 to 255 bytes without control characters: frameworks choose these names.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorName(Box<str>);

impl TensorName {
    /// Parses `name`.
    ///
    /// # Errors
    /// [`NameError`] names the rule that `name` breaks.
    pub fn new(name: &str) -> Result<Self, NameError> {
        check_length(name)?;
        match name.chars().find(|c| c.is_control()) {
            Some(found) => Err(NameError::ForbiddenChar { name: name.into(), found }),
            None => Ok(Self(name.into())),
        }
    }
}

/// The maximum length of a reader's name, in bytes.
const READER_NAME_MAX_BYTES: usize = 64;

/// The name under which a server keeps the place of one reader of a topic, e.g. `indexer-3`.
///
/// 1 to 64 characters of `A-Z a-z 0-9 . _ -`. A new subscription under the same name takes over the place, so
/// concurrent readers need different names.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReaderName(Box<str>);

impl ReaderName {
    /// Parses `name`.
    ///
    /// # Errors
    /// [`NameError`] names the rule that `name` breaks.
    pub fn new(name: &str) -> Result<Self, NameError> {
        match name.len() {
            0 => return Err(NameError::Empty),
            n if n > READER_NAME_MAX_BYTES => return Err(NameError::TooLong(n)),
            _ => {}
        }
        match name.chars().find(|c| !is_topic_char(*c)) {
            Some(found) => Err(NameError::ForbiddenChar { name: name.into(), found }),
            None => Ok(Self(name.into())),
        }
    }
}

/// Why a text is not a valid name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NameError {
    /// An empty name.
    #[error("a name must not be empty")]
    Empty,
    /// A name longer than 255 bytes, or a reader's name longer than 64.
    #[error(
        "a name has at most {NAME_MAX_BYTES} bytes, the name of a reader {READER_NAME_MAX_BYTES}; this one has {0}"
    )]
    TooLong(usize),
    /// Two slashes in a row, or a slash at an end.
    #[error("topic {0:?} has an empty segment: write `a/b`, with no slash at either end and none doubled")]
    EmptySegment(Box<str>),
    /// A segment `.` or `..`, which has a meaning in file systems.
    #[error("topic {0:?} has a segment `.` or `..`, which could name a path outside its folder")]
    DotSegment(Box<str>),
    /// A character outside the alphabet of this kind of name.
    #[error(
        "{name:?} contains {found:?}: topics use letters, digits, `.`, `_`, `-` and `/`, readers all of these but `/`, tensor names no control characters"
    )]
    ForbiddenChar {
        /// The whole name.
        name: Box<str>,
        /// The first character that is not allowed.
        found: char,
    },
}

fn check_length(name: &str) -> Result<(), NameError> {
    match name.len() {
        0 => Err(NameError::Empty),
        n if n > NAME_MAX_BYTES => Err(NameError::TooLong(n)),
        _ => Ok(()),
    }
}

fn is_topic_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

/// What all kinds of names have: they are texts.
macro_rules! texts {
    ($($Name:ident)*) => {$(
        impl $Name {
            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(&self.0, f)
            }
        }

        impl FromStr for $Name {
            type Err = NameError;

            fn from_str(name: &str) -> Result<Self, NameError> {
                Self::new(name)
            }
        }
    )*};
}

texts! { Topic TensorName ReaderName }

impl std::borrow::Borrow<str> for TensorName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usual_topics_are_valid() {
        for name in ["policy", "kv/req-17", "meta-llama/Llama-3.1-8B", "a.b_c", "..."] {
            assert_eq!(Topic::new(name).unwrap().as_str(), name);
        }
    }

    #[test]
    fn topics_that_could_change_a_path_or_a_url_are_invalid() {
        for name in [
            "", "/", "a/", "/a", "a//b", ".", "a/../b", "..", "a b", "a?b", "a\\b", "a\0b", "ä", "a:b", "a%b",
        ] {
            assert!(Topic::new(name).is_err(), "{name:?}");
        }
        assert_eq!(Topic::new(&"a".repeat(256)), Err(NameError::TooLong(256)));
        assert!(Topic::new(&"a".repeat(255)).is_ok());
    }

    proptest! {
        /// As a path, a topic is relative and never leads upwards.
        #[test]
        fn a_topic_stays_in_its_folder(name in "[a-z./_-]{1,12}") {
            if let Ok(topic) = Topic::new(&name) {
                let path = std::path::Path::new(topic.as_str());
                prop_assert!(path.is_relative());
                prop_assert!(path.components().all(|c| matches!(c, std::path::Component::Normal(_))));
            }
        }

        #[test]
        fn tensor_names_have_no_control_characters(name in any::<String>()) {
            if let Ok(parsed) = TensorName::new(&name) {
                prop_assert_eq!(parsed.as_str(), &name);
                prop_assert!(!name.chars().any(char::is_control));
            }
        }
    }
}
