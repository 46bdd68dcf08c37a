//! Access rights: verbs over topics, and the ticket token that carries them (PROTOCOL.md §2).
//!
//! Pure: the caller passes in the time and the secrets.

mod grant;
mod token;

pub use grant::{Grant, GrantError, Verb, Verbs};
pub use token::{Claims, Secret, SecretError, SecretId, TicketId, Token, TokenError};
