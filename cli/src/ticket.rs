//! Reads the ticket of a command: from the argument itself, a file or stdin.

use crate::{exit::UsageError, secret_file};
use anyhow::{Context, bail};
use std::io::{ErrorKind, Read};
use tensor_relay_client::{Ticket, Topic};
use tensor_relay_server::Token;

/// The maximum size of a file with tickets. A ticket has a few hundred bytes.
const SOURCE_MAX_BYTES: u64 = 1 << 20;

/// Reads the ticket in `source`: the ticket itself, `-` for stdin, or else the name of a file. If the file contains
/// several tickets, as `serve --ticket-file` writes for several topics, `topic` chooses one.
pub(crate) fn read(source: &str, topic: Option<&Topic>) -> anyhow::Result<Ticket> {
    choose(read_all(source)?, topic)
        .with_context(|| format!("cannot choose a ticket from {}", Token::hide(source)))
}

/// Reads the first ticket in `source`, for commands that depend neither on its topic nor on its rights.
pub(crate) fn read_any(source: &str) -> anyhow::Result<Ticket> {
    let first = read_all(source)?.into_iter().next();
    first.ok_or_else(|| UsageError(format!("{} holds no ticket", Token::hide(source))).into())
}

/// Reads the ticket in `source` for no topic in particular: of several, the one that names no topic, which `serve`
/// writes for all topics.
pub(crate) fn read_for_all(source: &str) -> anyhow::Result<Ticket> {
    let mut tickets = read_all(source)?;
    let general = tickets.iter().position(|ticket| ticket.topic().is_none());
    let error = match (general, tickets.len()) {
        (Some(index), _) => return Ok(tickets.swap_remove(index)),
        (None, 1) => return Ok(tickets.remove(0)),
        (None, 0) => "holds no ticket".to_owned(),
        (None, count) => {
            format!("holds {count} tickets, each for one topic: a ticket for several topics is needed")
        }
    };
    bail!(UsageError(format!("{} {error}", Token::hide(source))))
}

fn read_all(source: &str) -> anyhow::Result<Vec<Ticket>> {
    if ["relay://", "unix:"].iter().any(|scheme| source.starts_with(scheme)) {
        let ticket: Ticket = source.parse()?;
        if ticket.token().is_some() && std::env::args_os().any(|word| word == source) {
            crate::log::message!(
                "warning: every user of this machine can read the ticket in this command line while the command runs; \
                 pass the ticket in a file or in the variable TENSOR_RELAY_TICKET instead"
            );
        }
        return Ok(vec![ticket]);
    }
    let text = read_source(source)?;
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    let tickets = lines.iter().map(|line| line.parse()).collect::<Result<Vec<Ticket>, _>>();
    tickets.with_context(|| format!("{} holds no ticket", Token::hide(source)))
}

fn read_source(source: &str) -> anyhow::Result<String> {
    if source != "-" {
        return secret_file::read(source.as_ref(), SOURCE_MAX_BYTES).map_err(|error| {
            // `source` may be a truncated or mistyped ticket, whose token must not be printed.
            let redacted = Token::hide(source);
            UsageError(format!(
                "{redacted:?} is neither a ticket (relay://… or unix:…) nor a readable file: {error}"
            ))
            .into()
        });
    }
    let mut text = String::new();
    match std::io::stdin().take(SOURCE_MAX_BYTES).read_to_string(&mut text) {
        Ok(_) => Ok(text),
        Err(error) if error.kind() == ErrorKind::InvalidData => {
            bail!(UsageError("stdin holds no ticket: it is not text (UTF-8)".into()))
        }
        Err(error) => Err(error).context("cannot read stdin"),
    }
}

/// The ticket for `topic`, or the only one.
fn choose(mut tickets: Vec<Ticket>, topic: Option<&Topic>) -> anyhow::Result<Ticket> {
    if let Some(index) = tickets.iter().position(|ticket| topic.is_some() && ticket.topic() == topic) {
        return Ok(tickets.swap_remove(index));
    }
    // The last of several tickets grants all topics: see `serve`.
    match (tickets.len(), tickets.pop()) {
        (0, _) | (_, None) => bail!(UsageError("it is empty".into())),
        (1, Some(ticket)) => Ok(ticket),
        (_, Some(ticket)) if topic.is_some() => Ok(ticket),
        (count, _) => bail!(UsageError(format!("it holds {count} tickets: choose one with --topic NAME"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn ticket(topic: &str) -> String {
        format!("relay://10.0.0.1:4747/{topic}?key=sha256:{}", "ab".repeat(32))
    }

    /// Goal: the error about a damaged ticket does not contain the ticket's token.
    /// Method: damage a ticket in ways that make it look like the name of a file.
    #[test]
    fn no_error_shows_a_token() {
        let token = "AQAAAAFvT3Bk9xqYw-LrZ0c8bN2mH_sJd7uVeXiPg5tKaWfQyR1C4";
        let valid = format!("{}&token={token}", ticket("t"));
        for damaged in [&valid[1..], &valid[valid.len() - 30..], token, &format!("http{}", &valid[5..])] {
            let error = read(damaged, None).unwrap_err();
            let message = format!("{error:#} {error:?}");
            let parts: Vec<_> = (0..=token.len() - 12).map(|at| &token[at..at + 12]).collect();
            assert!(!parts.iter().any(|part| message.contains(part)), "{message}");
        }
        let missing = read("no/such.ticket", None).unwrap_err().to_string();
        assert!(missing.contains("no/such.ticket"), "{missing}");
    }

    /// A glob of topics uses the ticket for all of them, wherever it is in the file, and no other.
    #[test]
    fn several_topics_require_a_general_ticket() {
        let write = |tickets: &[&str]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            for topic in tickets {
                let general = ticket("").replace("/?", "?");
                let line = if topic.is_empty() { general } else { ticket(topic) };
                writeln!(file, "{line}").unwrap();
            }
            file
        };
        let read = |file: &tempfile::NamedTempFile| read_for_all(file.path().to_str().unwrap());
        for tickets in [["a", "b", ""], ["", "a", "b"]] {
            assert_eq!(read(&write(&tickets)).unwrap().topic(), None);
        }
        assert_eq!(read(&write(&["a"])).unwrap().topic().map(ToString::to_string), Some("a".into()));
        for (tickets, expected) in [(&["a", "b"][..], "2 tickets, each for one topic"), (&[], "no ticket")] {
            let error = read(&write(tickets)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_file_of_several_tickets_requires_a_topic() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        writeln!(file, "{}\n{}", ticket("a"), ticket("b")).unwrap();
        let path = file.path().to_str().unwrap();
        assert!(read(path, None).is_err());
        let b = Topic::new("b").unwrap();
        assert_eq!(read(path, Some(&b)).unwrap().topic(), Some(&b));
        assert!(read("/no/such/file", None).is_err());
        assert_eq!(read(&ticket("c"), None).unwrap().to_string(), ticket("c"));
    }
}
