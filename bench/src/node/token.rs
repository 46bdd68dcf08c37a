//! The secret by which a node authenticates a driver.

use std::{fmt, str::FromStr};

/// A token, shared by `node` and `run`. It is never sent: a driver answers a random challenge with a hash of the
/// challenge, keyed with the token. The orders that follow are neither encrypted nor signed, so an attacker who can
/// modify packets between the two can still inject orders.
#[derive(Clone)]
pub struct Token(String);

/// The minimum length: a shorter token could be guessed.
const CHARS_MIN: usize = 8;

/// The maximum length, so that a token fits a command line.
const CHARS_MAX: usize = 256;

/// The context of the derived key: it makes these hashes differ from those for other purposes.
const PURPOSE: &str = "tensor-relay bench 2026-11-21: a driver's answer to a node";

/// The error for a text that is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "a token has {CHARS_MIN} to {CHARS_MAX} visible characters; without --token, `node` makes and prints one"
)]
pub struct TokenError;

impl Token {
    /// A new token of 128 random bits.
    pub(crate) fn random() -> Self {
        Self(format!("{:032x}", rand::random::<u128>()))
    }

    /// The token in clear text, to be shown to the user.
    pub(crate) fn reveal(&self) -> &str {
        &self.0
    }

    /// The answer that proves knowledge of the token to the sender of `challenge`.
    pub(crate) fn answer(&self, challenge: &str) -> String {
        self.keyed_hash(challenge).to_hex().to_string()
    }

    /// Whether `answer` proves knowledge of the token. Takes the same time for all wrong hashes.
    pub(crate) fn accepts(&self, challenge: &str, answer: &str) -> bool {
        // `blake3::Hash` compares in constant time.
        blake3::Hash::from_hex(answer).is_ok_and(|answer| answer == self.keyed_hash(challenge))
    }

    fn keyed_hash(&self, challenge: &str) -> blake3::Hash {
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
    fn an_answer_is_valid_for_one_token_and_one_challenge() {
        let (token, other) = (Token::random(), Token::random());
        let answer = token.answer("one");
        assert!(token.accepts("one", &answer));
        assert!(!token.accepts("two", &answer), "an intercepted answer cannot be replayed");
        assert!(!other.accepts("one", &answer));
        for wrong in ["", "00", &"é".repeat(32), &"0".repeat(64), &answer[1..]] {
            assert!(!token.accepts("one", wrong), "{wrong:?}");
        }
    }

    #[test]
    fn tokens_are_validated_and_not_printed() {
        for wrong in ["", "short", "with a space in it", "tab\tand more", &"x".repeat(257)] {
            assert!(wrong.parse::<Token>().is_err(), "{wrong:?}");
        }
        let token: Token = "correct-horse".parse().unwrap();
        assert!(!format!("{token:?}").contains("horse"));
        assert_eq!(Token::random().reveal().parse::<Token>().unwrap().0.len(), 32);
    }
}
