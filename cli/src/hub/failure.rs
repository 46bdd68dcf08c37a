//! [`Failure`]: why a request is not answered with what it asks for.

use super::body::HubBody;
use crate::exit::message_of;
use hyper::{
    Response, StatusCode,
    header::{self, HeaderName, HeaderValue},
};
use serde_json::json;
use std::fmt;
use tensor_relay_client::{ClientError, EndReason, GetError, SubscriptionError, Topic, Version};
use tensor_relay_server::Token;

/// The header by which Hugging Face's client tells errors apart.
const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");

/// The header whose text it shows.
const ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");

/// The maximum length of that text, far below what clients accept in a header.
const MESSAGE_MAX_CHARS: usize = 1_000;

/// An answer other than success, with its reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Failure {
    status: StatusCode,
    code: Option<&'static str>,
    message: String,
}

impl Failure {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, code: None, message: message.into() }
    }

    fn coded(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { status, code: Some(code), message: message.into() }
    }

    /// The token is missing or wrong.
    pub(super) fn no_token() -> Self {
        let message = "this tensor-relay hub needs its token: set HF_TOKEN to the one that it printed at its start, or to the \
                       content of its --hub-token-file";
        Self::coded(StatusCode::UNAUTHORIZED, "GatedRepo", message)
    }

    /// The hub has no such repository.
    pub(super) fn no_repo(repo: &str) -> Self {
        let message = format!(
            "no topic {repo} is offered to this hub: its ticket may not grant it, or it has no version yet; `tensor-relay \
             list TICKET` shows the topics"
        );
        Self::coded(StatusCode::NOT_FOUND, "RepoNotFound", message)
    }

    /// The text is no revision, or no such version was published.
    pub(super) fn no_revision(repo: &str, revision: &str, why: &str) -> Self {
        let message = format!(
            "{repo} has no revision {revision}: {why}; revisions are main, vN, EPOCH:N and the commits that the hub names"
        );
        Self::coded(StatusCode::NOT_FOUND, "RevisionNotFound", message)
    }

    /// The version was there, and is not kept any more.
    pub(super) fn gone(topic: &Topic, version: Version) -> Self {
        let message = format!(
            "version {version} of {topic} is no longer kept by its server: use main, or keep more versions there (serve \
             --keep-versions)"
        );
        Self::coded(StatusCode::GONE, "RevisionNotFound", message)
    }

    /// The version has no such file.
    pub(super) fn no_file(repo: &str, path: &str) -> Self {
        Self::coded(
            StatusCode::NOT_FOUND,
            "EntryNotFound",
            format!("{repo} has no file {path} at this revision"),
        )
    }

    /// The hub has nothing at the path.
    pub(super) fn no_route() -> Self {
        Self::new(
            StatusCode::NOT_FOUND,
            "this tensor-relay hub answers requests for models only, and only reads",
        )
    }

    /// The server did not answer in time.
    pub(super) fn late(what: &str, seconds: u64) -> Self {
        let message = format!("{what} did not arrive from the server of the topic within {seconds} s");
        Self::new(StatusCode::GATEWAY_TIMEOUT, message)
    }

    /// The server process is another one than that of which a version is read.
    pub(super) fn restarted() -> Self {
        let message =
            "the server of the topic was restarted, and may have other content under this version: ask again";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// Whether the server refuses what is asked for.
    pub(super) fn is_refusal(&self) -> bool {
        self.status == StatusCode::FORBIDDEN
    }

    /// A session failed.
    pub(super) fn of_client(error: &ClientError) -> Self {
        let message = Token::redact(&error.to_string());
        match error.is_unauthorised() {
            true => Self::coded(StatusCode::FORBIDDEN, "GatedRepo", message),
            false => Self::new(StatusCode::SERVICE_UNAVAILABLE, message),
        }
    }

    /// Of a version: whether it left the server, so that another answer may be clearer.
    pub(super) fn is_not_kept(error: &GetError) -> bool {
        matches!(error, GetError::Subscription(SubscriptionError::VersionNotFound { .. }))
    }
}

impl From<GetError> for Failure {
    fn from(error: GetError) -> Self {
        let status = match &error {
            GetError::Client(error) => return Self::of_client(error),
            GetError::Subscription(error) => match error {
                SubscriptionError::NotFound { topic, .. } => return Self::no_repo(topic.as_str()),
                SubscriptionError::VersionNotFound { topic, version, .. } => {
                    return Self::gone(topic, *version);
                }
                SubscriptionError::Ended { topic, reason } => match reason {
                    EndReason::Forbidden => {
                        let message = error.to_string();
                        return Self::coded(StatusCode::FORBIDDEN, "GatedRepo", message);
                    }
                    EndReason::TopicEnded | EndReason::Withdrawn | EndReason::Expired => {
                        return Self::no_repo(topic.as_str());
                    }
                    _ => StatusCode::BAD_GATEWAY,
                },
                SubscriptionError::Disconnected { source, .. } => return Self::of_client(source),
                SubscriptionError::Stalled { .. } => StatusCode::GATEWAY_TIMEOUT,
                SubscriptionError::OverBudget { .. } => StatusCode::INSUFFICIENT_STORAGE,
                _ => StatusCode::BAD_GATEWAY,
            },
        };
        Self::new(status, Token::redact(&message_of(&error.into())))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

impl From<Failure> for Response<HubBody> {
    fn from(failure: Failure) -> Self {
        let mut response = Self::new(HubBody::from(json!({ "error": failure.message }).to_string()));
        *response.status_mut() = failure.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(code) = failure.code {
            headers.insert(ERROR_CODE, HeaderValue::from_static(code));
        }
        if let Ok(message) = HeaderValue::from_str(&in_a_header(&failure.message)) {
            headers.insert(ERROR_MESSAGE, message);
        }
        if failure.status == StatusCode::SERVICE_UNAVAILABLE {
            headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A text that a header can hold: on one line, in ASCII.
fn in_a_header(text: &str) -> String {
    let shown = |c: char| match c {
        ' '..='~' => c,
        c if c.is_whitespace() => ' ',
        _ => '?',
    };
    text.chars().take(MESSAGE_MAX_CHARS).map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_in_headers() {
        let failure = Failure::no_file("m", "modèle\n.bin");
        let response = Response::from(failure);
        assert_eq!(response.status(), StatusCode::NOT_FOUND);
        assert_eq!(response.headers()["x-error-code"], "EntryNotFound");
        assert_eq!(response.headers()["x-error-message"], "m has no file mod?le .bin at this revision");
    }

    #[test]
    fn a_version_that_is_gone_is_not_one_that_never_was() {
        let topic = Topic::new("t").unwrap();
        let error = SubscriptionError::VersionNotFound { topic, version: Version(3), detail: String::new() };
        let error = GetError::from(error);
        assert!(Failure::is_not_kept(&error));
        let response = Response::from(Failure::from(error));
        assert_eq!(response.status(), StatusCode::GONE);
        assert_eq!(response.headers()["x-error-code"], "RevisionNotFound");
    }
}
