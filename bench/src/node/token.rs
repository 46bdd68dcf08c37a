//! The secret that a driver must know to give a node work.

use std::{fmt, str::FromStr};

/// A token, as `node` prints it and `run` is given it. It never travels: who knows it answers a fresh challenge with a
/// keyed hash of it. What follows is neither encrypted nor signed, so whoever can change packets between the two can
/// still give orders: it keeps strangers out, not attackers on the path.
#[derive(Clone)]
pub struct Token(String);

/// Fewer characters could be guessed.
const CHARS_MIN: usize = 8;

/// More would be no word for a command line.
const CHARS_MAX: usize = 256;

/// Sets these hashes apart from all others.
const PURPOSE: &str = "tensor-relay bench 2026-11-21: a driver's answer to a node";

/// Why a text is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a token has {CHARS_MIN} to {CHARS_MAX} visible characters; without --token, `node` makes and prints one"
)]
pub struct TokenError;

impl Token {
    /// A fresh one of 128 random bits.
    pub(crate) fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// The token in full, to be shown to the person who has to pass it on.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// The answer to `challenge` by a holder of the token.
    pub(crate) fn answer(&self, challenge: &str) -> String {
        self.keyed(challenge).to_hex().to_string()
    }

    /// Whether `answer` is what somebody says who knows it. Takes the same time for all wrong answers.
    pub(crate) fn accepts(&self, challenge: &str, answer: &str) -> bool {
        // The comparison of such hashes takes constant time.
        blake3::Hash::from_hex(answer).is_ok_and(|answer| answer == self.keyed(challenge))
    }

    fn keyed(&self, challenge: &str) -> blake3::Hash {
        blake3::keyed_hash(&blake3::derive_key(PURPOSE, self.0.as_bytes()), challenge.as_bytes())
    }
}

impl FromStr for Token {
    type Err = TokenError;

    fn from_str(text: &str) -> Result<Self, TokenError> {
        let fits = (CHARS_MIN..=CHARS_MAX).contains(&text.len());
        match fits && text.chars().all(|c| c.is_ascii_graphic()) {
            true => Ok(Self(text.into())),
            false => Err(TokenError),
        }
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_token_answers_and_only_this_challenge() {
        let (token, other) = (Token::random(), Token::random());
        let answer = token.answer("one");
        assert!(token.accepts("one", &answer));
        assert!(!token.accepts("two", &answer), "an answer that was overheard is worth nothing");
        assert!(!other.accepts("one", &answer));
        for wrong in ["", "00", &"é".repeat(32), &"0".repeat(64), &answer[1..]] {
            assert!(!token.accepts("one", wrong), "{wrong:?}");
        }
    }

    #[test]
    fn tokens_are_words_and_stay_secret() {
        for wrong in ["", "short", "with a space in it", "tab\tand more", &"x".repeat(257)] {
            assert!(wrong.parse::<Token>().is_err(), "{wrong:?}");
        }
        let token: Token = "correct-horse".parse().unwrap();
        assert!(!format!("{token:?}").contains("horse"));
        assert_eq!(Token::random().reveal().parse::<Token>().unwrap().0.len(), 32);
    }
}
