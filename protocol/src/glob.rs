//! Globs: patterns over names, parsed once, matched in time linear in the name (PROTOCOL.md §4.4).

use crate::name::NAME_MAX_BYTES;
use std::fmt;

const WILDCARDS: [char; 2] = ['*', '?'];

/// A pattern over topics or tensor names, e.g. `kv/*` or `model.layers.1?.**`.
///
/// `*` matches any run of characters except `/`, `**` any run of characters, `?` one character except `/`; every other
/// character matches itself, and none can be escaped. A pattern must match the whole name. It has 1 to 255 bytes and no
/// control characters.
///
/// A glob needs up to 10 KiB of memory; usual ones need about 1 KiB.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Glob {
    text: Box<str>,
    /// The offset in `text` behind the last wildcard: a name can match only if it ends with the characters from there.
    tail: u8,
    automaton: Automaton,
}

impl Glob {
    /// Parses `pattern`.
    ///
    /// # Errors
    /// [`GlobError`] names the rule that the pattern breaks.
    pub fn new(pattern: &str) -> Result<Self, GlobError> {
        match pattern.len() {
            0 => return Err(GlobError::Empty),
            n if n > NAME_MAX_BYTES => return Err(GlobError::TooLong(n)),
            _ => {}
        }
        if let Some(found) = pattern.chars().find(|c| c.is_control()) {
            return Err(GlobError::ControlChar { glob: pattern.into(), found });
        }
        // A pattern has at most 255 bytes, so this fits.
        let tail = pattern.rfind(WILDCARDS).map_or(0, |at| at + 1) as u8;
        Ok(Self { text: pattern.into(), tail, automaton: Automaton::new(pattern) })
    }

    /// Whether the glob matches the whole of `name`. Takes at most about 10 ns per character; allocates nothing.
    pub fn matches(&self, name: &str) -> bool {
        name.ends_with(&self.text[usize::from(self.tail)..]) && self.automaton.accepts(name)
    }

    /// Whether the pattern has no wildcard.
    pub fn is_literal(&self) -> bool {
        !self.text.contains(WILDCARDS)
    }

    /// The pattern as text.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

/// Why a text is not a glob.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GlobError {
    /// An empty pattern.
    #[error("a glob must not be empty: write `**` for every name")]
    Empty,
    /// A pattern of more than 255 bytes.
    #[error("a glob has at most {NAME_MAX_BYTES} bytes, this one has {0}")]
    TooLong(usize),
    /// A pattern with a control character.
    #[error("the glob {glob:?} contains {found:?}: names have no control characters, so it could match none")]
    ControlChar {
        /// The whole pattern.
        glob: Box<str>,
        /// The first character that is not allowed.
        found: char,
    },
}

impl fmt::Display for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Glob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl std::str::FromStr for Glob {
    type Err = GlobError;

    fn from_str(pattern: &str) -> Result<Self, GlobError> {
        Self::new(pattern)
    }
}

/// The pattern as a nondeterministic automaton. A set of states is a bit mask, so all states of the set advance
/// together, without backtracking.
///
/// In state `n`, the first `n` characters of the pattern, not counting stars, have matched. A star at that position of
/// the pattern is a transition from the state to itself.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Automaton {
    /// The states with a transition to themselves on any character: those at a `**`.
    any: States,
    /// The states with a transition to themselves on any character except `/`: those at a `*` or `**`.
    segment: States,
    /// The states with a transition to the next state on any character except `/`: those at a `?`.
    one: States,
    /// For each literal character of the pattern, sorted by character: the states with a transition to the next state
    /// on it.
    letters: Box<[(char, States)]>,
    /// The final state.
    end: u8,
}

impl Automaton {
    /// The automaton of `pattern`, which has at most 255 characters, so that every state has a bit.
    fn new(pattern: &str) -> Self {
        let (mut any, mut segment, mut one) = (States::NONE, States::NONE, States::NONE);
        let mut letters = std::collections::BTreeMap::new();
        let mut state = 0;
        for character in pattern.chars() {
            match character {
                // The second star of `**`, or a further one, which is redundant.
                '*' if segment.contains(state) => any.insert(state),
                '*' => segment.insert(state),
                '?' => one.insert(state),
                other => letters.entry(other).or_insert(States::NONE).insert(state),
            }
            state += u8::from(character != '*');
        }
        Self { any, segment, one, letters: letters.into_iter().collect(), end: state }
    }

    fn accepts(&self, name: &str) -> bool {
        let mut states = States::NONE;
        states.insert(0);
        for character in name.chars() {
            let (advancing, staying) = self.transitions(character);
            states = (states & advancing).next() | (states & staying);
            if states == States::NONE {
                return false;
            }
        }
        states.contains(self.end)
    }

    /// The states with a transition on `character` to the next state, and those with one to themselves.
    fn transitions(&self, character: char) -> (States, States) {
        let letter = match self.letters.binary_search_by_key(&character, |(letter, _)| *letter) {
            Ok(at) => self.letters[at].1,
            Err(_) => States::NONE,
        };
        match character {
            '/' => (letter, self.any),
            _ => (letter | self.one, self.segment | self.any),
        }
    }
}

/// A set of the numbers 0 to 255.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct States([u64; 4]);

impl States {
    const NONE: Self = Self([0; 4]);

    fn insert(&mut self, state: u8) {
        self.0[usize::from(state / 64)] |= 1 << (state % 64);
    }

    fn contains(self, state: u8) -> bool {
        self.0[usize::from(state / 64)] & (1 << (state % 64)) != 0
    }

    /// Every number of the set plus one. State 255 can only be the final state, so there is no overflow.
    fn next(self) -> Self {
        let [a, b, c, d] = self.0;
        Self([a << 1, b << 1 | a >> 63, c << 1 | b >> 63, d << 1 | c >> 63])
    }
}

impl std::ops::BitAnd for States {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }
}

impl std::ops::BitOr for States {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matches(pattern: &str, name: &str) -> bool {
        Glob::new(pattern).unwrap().matches(name)
    }

    #[test]
    fn usual_globs_match_as_documented() {
        assert!(matches("policy", "policy"));
        assert!(!matches("policy", "policy2"));
        assert!(matches("kv/*", "kv/req-17"));
        assert!(!matches("kv/*", "kv/a/b"));
        assert!(matches("kv/**", "kv/a/b"));
        assert!(!matches("kv/**", "kv"));
        assert!(matches("model.layers.?.**", "model.layers.3.mlp.up_proj.weight"));
        assert!(!matches("model.layers.?.**", "model.layers.13.mlp.up_proj.weight"));
        assert!(matches("**.bias", "model.norm.bias"));
        assert!(matches("*", "kv") && !matches("*", "kv/a") && matches("**", "kv/a"));
        assert!(matches("?", "é"), "a character, not a byte");
        assert!(!matches("a?b", "a/b"));
    }

    #[test]
    fn invalid_globs_are_refused_and_literals_recognised() {
        assert_eq!(Glob::new(""), Err(GlobError::Empty));
        assert_eq!(Glob::new(&"*".repeat(256)), Err(GlobError::TooLong(256)));
        assert!(matches!(Glob::new("a\nb"), Err(GlobError::ControlChar { found: '\n', .. })));
        assert!(Glob::new("a[b]{c}\\").unwrap().is_literal());
        assert!(!Glob::new("a?").unwrap().is_literal());
        assert_eq!("kv/*".parse::<Glob>().unwrap().to_string(), "kv/*");
    }

    /// The longest patterns use all 256 states.
    #[test]
    fn patterns_of_255_characters_match() {
        assert!(matches(&"a".repeat(255), &"a".repeat(255)));
        assert!(!matches(&"a".repeat(255), &"a".repeat(254)));
        assert!(!matches(&"a".repeat(255), &"a".repeat(256)));
        assert!(matches(&"?".repeat(255), &"a".repeat(255)));
        assert!(matches(&"*".repeat(255), &"a/".repeat(500)));
        assert!(!matches(&format!("{}b", "a*".repeat(127)), &"a".repeat(10_000)));
    }

    /// The reference implementation of PROTOCOL.md §4.4, of exponential cost.
    fn reference(pattern: &[char], name: &[char]) -> bool {
        let after_a_run = |rest: &[char], allows: fn(&[char]) -> bool| {
            (0..=name.len()).any(|n| allows(&name[..n]) && reference(rest, &name[n..]))
        };
        match pattern {
            [] => name.is_empty(),
            ['*', '*', rest @ ..] => after_a_run(rest, |_| true),
            ['*', rest @ ..] => after_a_run(rest, |run| !run.contains(&'/')),
            ['?', rest @ ..] => name.first().is_some_and(|c| *c != '/') && reference(rest, &name[1..]),
            [letter, rest @ ..] => name.first() == Some(letter) && reference(rest, &name[1..]),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn matches_like_the_reference(pattern in "[ab/*?é]{1,7}", name in "[ab/é]{0,8}") {
            let chars = |text: &str| text.chars().collect::<Vec<char>>();
            prop_assert_eq!(matches(&pattern, &name), reference(&chars(&pattern), &chars(&name)));
        }

        #[test]
        fn arbitrary_text_does_not_panic(pattern in any::<String>(), name in any::<String>()) {
            if let Ok(glob) = Glob::new(&pattern) {
                prop_assert!(!glob.is_literal() || glob.matches(&name) == (pattern == name));
                prop_assert_eq!(glob.as_str(), &pattern);
            }
        }
    }
}
