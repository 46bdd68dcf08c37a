//! Who may do what: verbs over topics, and the token of a ticket, which carries them (PROTOCOL.md §2).
//!
//! Pure: the time is told to it, and secrets are given to it.

mod grant;
mod token;

pub use grant::{Grant, GrantError, Verb, Verbs};
pub use token::{Claims, Secret, SecretError, SecretId, TicketId, Token, TokenError};
