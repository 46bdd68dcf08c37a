//! [`Service`]: answers requests.

use super::{
    access::Access,
    blocks::Blocks,
    body::{FileBody, HubBody, Readers},
    describing,
    failure::Failure,
    names::{Revision, is_repo_id},
    origin::{GotError, Newest, Origin},
    range::{Selected, select},
    routes::{self, Route, Target},
    version::HubVersion,
    versions::{Key, Versions},
};
use hyper::{
    HeaderMap, Method, Request, Response, StatusCode,
    body::{Body, Incoming},
    header::{self, HeaderName, HeaderValue},
};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, HashSet},
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    time::Duration,
};
use tensor_relay_client::{InstanceId, Request as Wanted, Snapshot, Start, Topic, VersionId};
use tokio::time::timeout;

/// The deadline for a version's description: Hugging Face's client waits 10 s for the size of a file.
const DESCRIPTION_TIMEOUT: Duration = Duration::from_secs(30);

/// The deadline for the body of a request, and its maximum size: a list of paths.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
const BODY_MAX_BYTES: usize = 1 << 20;

/// The entries of a page of a tree.
const PAGE_MAX: usize = 1_000;

/// The commit of an answer, which clients ask for from then on.
const REPO_COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");

/// The size and tag of a file, which clients prefer to `Content-Length` and `ETag`: these may be those of a redirection.
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");

/// The header in which a proxy says how it was asked, for addresses that clients are told.
const FORWARDED_SCHEME: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// What a hub offers, and to whom.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) access: Access,
    origins: Vec<Arc<Origin>>,
    /// Topics under other names.
    names: BTreeMap<String, Topic>,
    versions: Versions,
    blocks: Arc<Blocks>,
    readers: Arc<Readers>,
}

/// The topics of each origin, as far as it answers.
type Topics = Vec<Result<Arc<Newest>, Failure>>;

/// A topic that an origin has.
struct Found<'a> {
    origin: usize,
    list: &'a Newest,
    newest: &'a VersionId,
}

type Answer = Result<Response<HubBody>, Failure>;

impl Service {
    pub(super) fn new(
        access: Access,
        origins: Vec<Arc<Origin>>,
        names: BTreeMap<String, Topic>,
        memory_bytes: u64,
    ) -> Self {
        let blocks = Arc::new(Blocks::new(memory_bytes));
        Self { access, origins, names, versions: Versions::default(), blocks, readers: Arc::default() }
    }

    /// The repositories, with their newest versions. Those whose name no client accepts are left out.
    ///
    /// # Errors
    /// [`Failure`] when no server answers.
    pub(super) async fn repos(&self) -> Result<BTreeMap<String, VersionId>, Failure> {
        self.repos_of(&self.topics().await)
    }

    fn repos_of(&self, topics: &Topics) -> Result<BTreeMap<String, VersionId>, Failure> {
        if let (true, Some(Err(failure))) = (topics.iter().all(Result::is_err), topics.first()) {
            return Err(failure.clone());
        }
        let mut repos = BTreeMap::new();
        for Newest { topics, .. } in topics.iter().flatten().map(|newest| &**newest) {
            let named = self
                .names
                .iter()
                .filter_map(|(repo, topic)| Some((repo.clone(), topics.get(topic)?)));
            let own = topics.iter().map(|(topic, id)| (topic.to_string(), id));
            for (repo, id) in named.chain(own).filter(|(repo, _)| is_repo_id(repo)) {
                repos.entry(repo).or_insert_with(|| id.clone());
            }
        }
        Ok(repos)
    }

    /// The answer to `request`.
    pub(super) async fn answer(&self, request: Request<Incoming>) -> Response<HubBody> {
        let mut response = match self.checked(request).await {
            Ok(response) => response,
            Err(failure) => failure.into(),
        };
        let headers = response.headers_mut();
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
        response
    }

    async fn checked(&self, request: Request<Incoming>) -> Answer {
        self.access.check(request.headers())?;
        let is_read = [Method::GET, Method::HEAD].contains(request.method());
        let topics = self.topics().await;
        let route = routes::parse(request.uri().path(), |repo| self.find(&topics, repo).is_ok());
        let query = request.uri().query().unwrap_or("").to_owned();
        match route.ok_or_else(Failure::no_route)? {
            Route::Paths(target) if request.method() == Method::POST => {
                let version = self.version(&topics, &target).await?;
                self.paths(&version, request).await
            }
            Route::File(target, path) if is_read => self.file(&topics, (&target, &path), &request).await,
            Route::Identity if is_read => Ok(object(&describing::identity())),
            Route::Models if is_read => self.models(&topics, &query),
            Route::Info(target) if is_read => {
                let version = self.version(&topics, &target).await?;
                Ok(of_version(object(&describing::info(&target.repo, &version)), &version))
            }
            Route::Refs(repo) if is_read => {
                let found = self.find(&topics, &repo)?;
                Ok(object(&describing::refs(found.newest)))
            }
            Route::Tree(target, folder) if is_read => {
                let version = self.version(&topics, &target).await?;
                match &*folder {
                    "" => Ok(tree(&version, request.headers(), (request.uri().path(), &query))),
                    folder => Err(Failure::no_file(&target.repo, folder)),
                }
            }
            _ => Err(Failure::no_route()),
        }
    }

    async fn topics(&self) -> Topics {
        let mut topics = vec![];
        for origin in &self.origins {
            topics.push(origin.newest().await);
        }
        topics
    }

    fn find<'t>(&self, topics: &'t Topics, repo: &str) -> Result<Found<'t>, Failure> {
        let topic = self.names.get(repo).cloned().or_else(|| Topic::new(repo).ok());
        let topic = topic.ok_or_else(|| Failure::no_repo(repo))?;
        let mut lists = topics.iter().enumerate();
        let found = lists.find_map(|(origin, listed)| {
            let list = &**listed.as_ref().ok()?;
            Some(Found { origin, list, newest: list.topics.get(&topic)? })
        });
        match (found, topics.iter().find_map(|newest| newest.as_ref().err())) {
            (Some(found), _) => Ok(found),
            (None, Some(failure)) => Err(failure.clone()),
            (None, None) => Err(Failure::no_repo(repo)),
        }
    }

    /// The version of a repository that a revision names.
    async fn version(&self, topics: &Topics, target: &Target) -> Result<Arc<HubVersion>, Failure> {
        let Found { origin, list, newest } = self.find(topics, &target.repo)?;
        let Newest { instance, reversals, .. } = *list;
        let key = |id: &VersionId| Key { origin, instance, reversals, id: id.clone() };
        let no_revision = |why: &str| Failure::no_revision(&target.repo, &target.revision, why);
        let revision = Revision::parse(&target.revision).ok_or_else(|| no_revision("it is none of these"))?;
        let of = |epoch, version| VersionId { topic: newest.topic.clone(), epoch, version };
        let id = match revision {
            Revision::Main => newest.clone(),
            Revision::Number(version) => of(newest.epoch, version),
            Revision::Exactly(epoch, version) => of(epoch, version),
        };
        if let Some(version) = self.versions.find(&key(&id)) {
            version.keep();
            return Ok(version);
        }
        // By its number, so that the server keeps it for its readers.
        let exactly = Wanted::newest(id.topic.clone()).from(Start::Exactly(Some(id.epoch), id.version));
        let described = match self.describe(origin, exactly).await {
            Err(GotError::Get(error)) if revision == Revision::Main && Failure::is_not_kept(&error) => {
                self.describe(origin, Wanted::newest(id.topic.clone())).await // A newer one has replaced it.
            }
            described => described,
        };
        let described = described.map_err(|error| match error {
            GotError::Get(error) if Failure::is_not_kept(&error) => {
                match id.epoch == newest.epoch && id.version > newest.version {
                    true => no_revision("it was not published yet"),
                    false => Failure::gone(&id.topic, id.version),
                }
            }
            error => error.into(),
        })?;
        let (server, key) = (Arc::clone(&self.origins[origin]), key(described.0.id()));
        let describe = |number| HubVersion::new(server, number, described, &self.blocks);
        self.versions.get(key, describe).await
    }

    async fn describe(&self, origin: usize, request: Wanted) -> Result<(Snapshot, InstanceId), GotError> {
        let described =
            self.origins[origin].get(request.describe(), "a version's description", DESCRIPTION_TIMEOUT);
        described.await
    }

    fn models(&self, topics: &Topics, query: &str) -> Answer {
        let wanted = |name| routes::parameter(query, name).map(|value| value.to_lowercase());
        let (search, author) = (wanted("search"), wanted("author"));
        let is_wanted = |repo: &str| {
            let repo = repo.to_lowercase();
            search.as_ref().is_none_or(|search| repo.contains(&**search))
                && author
                    .as_ref()
                    .is_none_or(|author| repo.split_once('/').is_some_and(|(found, _)| found == author))
        };
        let repos = self.repos_of(topics)?;
        let models = repos.iter().filter(|(repo, _)| is_wanted(repo));
        let models: Vec<Value> = models.map(|(repo, newest)| describing::entry(repo, newest)).collect();
        Ok(object(&models.into()))
    }

    /// The files of a list of paths that exist.
    async fn paths(&self, version: &HubVersion, request: Request<Incoming>) -> Answer {
        let (parts, body) = request.into_parts();
        let body = timeout(BODY_TIMEOUT, collect(body)).await;
        let body = body.map_err(|_| bad_request("the body of the request did not arrive"))??;
        let wanted = PathsWanted::parse(&parts.headers, &body)?;
        let paths: HashSet<&str> = wanted.paths.iter().map(String::as_str).collect();
        let files = version
            .files()
            .iter()
            .enumerate()
            .filter(|(_, file)| paths.contains(&*file.name));
        let entries = describing::tree(version, files.map(|(position, _)| position), wanted.expand);
        Ok(of_version(object(&entries.into()), version))
    }

    async fn file(
        &self,
        topics: &Topics,
        (target, path): (&Target, &str),
        request: &Request<Incoming>,
    ) -> Answer {
        let version = self.version(topics, target).await?;
        let position = version.file(path).ok_or_else(|| Failure::no_file(&target.repo, path))?;
        let file = &version.files()[position];
        let header = |name| request.headers().get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        let selected = select(header(header::RANGE), header(header::IF_RANGE), &file.tag, file.bytes);
        let tag = format!("\"{}\"", file.tag);
        let is_held =
            header(header::IF_NONE_MATCH).is_some_and(|tags| tags.split(',').any(|it| it.trim() == tag));
        let (status, range) = match selected {
            _ if is_held => (StatusCode::NOT_MODIFIED, 0..0),
            Selected::Whole => (StatusCode::OK, 0..file.bytes),
            Selected::Part(range) => (StatusCode::PARTIAL_CONTENT, range),
            Selected::Nothing => (StatusCode::RANGE_NOT_SATISFIABLE, 0..0),
        };
        let length = range.end - range.start;
        let content_range = match status {
            StatusCode::PARTIAL_CONTENT => {
                Some(format!("bytes {}-{}/{}", range.start, range.end - 1, file.bytes))
            }
            StatusCode::RANGE_NOT_SATISFIABLE => Some(format!("bytes */{}", file.bytes)),
            _ => None,
        };
        let body = match *request.method() == Method::HEAD || length == 0 {
            true => HubBody::empty(),
            false => {
                let body =
                    FileBody::begin(Arc::clone(&version), (position, range), &self.blocks, &self.readers);
                HubBody::File(body.await?)
            }
        };
        let mut response = of_version(Response::new(body), &version);
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type(&file.name)));
        if status != StatusCode::NOT_MODIFIED {
            headers.insert(header::CONTENT_LENGTH, length.into());
        }
        headers.insert(LINKED_SIZE, file.bytes.into());
        for (name, value) in [
            (header::ETAG, Some(&tag)),
            (LINKED_ETAG, Some(&tag)),
            (header::CONTENT_RANGE, content_range.as_ref()),
        ] {
            if let Some(value) = value.and_then(|value| HeaderValue::from_str(value).ok()) {
                headers.insert(name, value);
            }
        }
        Ok(response)
    }
}

/// A page of the files of a version. A version has no folders, so a tree is recursive or not.
fn tree(version: &HubVersion, headers: &HeaderMap, (path, query): (&str, &str)) -> Response<HubBody> {
    let parameter = |name| routes::parameter(query, name);
    let number = |name| parameter(name).and_then(|value| value.parse::<usize>().ok());
    let is_on = |name| parameter(name).is_some_and(|value| matches!(&*value.to_lowercase(), "true" | "1"));
    let limit = number("limit").map_or(PAGE_MAX, |limit| limit.clamp(1, PAGE_MAX));
    let count = version.files().len();
    let begin = number("cursor").map_or(0, |cursor| cursor.min(count));
    let end = begin.saturating_add(limit).min(count);
    let expand = is_on("expand");
    let entries = describing::tree(version, begin..end, expand);
    let mut response = of_version(object(&entries.into()), version);
    if end < count {
        let server = server_of(headers);
        let (recursive, commit) = (is_on("recursive"), &version.commit);
        // The next page is of the same version, whatever was published meanwhile.
        let path = path.trim_end_matches('/').rsplit_once('/').map_or(path, |(start, _)| start);
        let next = format!(
            "<{server}{path}/{commit}?recursive={recursive}&expand={expand}&limit={limit}&cursor={end}>; rel=\"next\""
        );
        if let Ok(next) = HeaderValue::from_str(&next) {
            response.headers_mut().insert(header::LINK, next);
        }
    }
    response
}

/// The address by which a client reached the hub. Hugging Face's client follows absolute addresses only. A client that
/// makes up the scheme misleads itself alone.
fn server_of(headers: &HeaderMap) -> String {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let scheme = if text(FORWARDED_SCHEME) == Some("https") { "https" } else { "http" };
    text(header::HOST).map_or_else(String::new, |host| format!("{scheme}://{host}"))
}

/// The body of a request for some paths, as a form or as JSON.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
struct PathsWanted {
    paths: Vec<String>,
    #[serde(default)]
    expand: bool,
}

impl PathsWanted {
    fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Self, Failure> {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
        if kind.is_some_and(|kind| kind.starts_with("application/json")) {
            return serde_json::from_slice(body)
                .map_err(|error| bad_request(&format!("the body is wrong: {error}")));
        }
        let text = std::str::from_utf8(body).map_err(|_| bad_request("the body is not text"))?;
        let mut wanted = Self::default();
        for pair in text.split('&') {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = value.replace('+', " ");
            let value = routes::decode(&value).ok_or_else(|| bad_request("the body is not text"))?;
            match name {
                "paths" => wanted.paths.push(value.into_owned()),
                "expand" => wanted.expand = matches!(&*value.to_lowercase(), "true" | "1"),
                _ => {}
            }
        }
        Ok(wanted)
    }
}

/// The whole body of a request.
async fn collect(mut body: Incoming) -> Result<Vec<u8>, Failure> {
    let mut collected = vec![];
    while let Some(frame) = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await {
        let frame = frame.map_err(|error| bad_request(&error.to_string()))?;
        collected.extend_from_slice(frame.data_ref().map_or(&[], |data| data));
        if collected.len() > BODY_MAX_BYTES {
            return Err(Failure::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "the list of paths is longer than 1 MiB",
            ));
        }
    }
    Ok(collected)
}

fn bad_request(why: &str) -> Failure {
    Failure::new(StatusCode::BAD_REQUEST, why)
}

fn object(value: &Value) -> Response<HubBody> {
    let mut response = Response::new(HubBody::from(value.to_string()));
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

fn of_version(mut response: Response<HubBody>, version: &HubVersion) -> Response<HubBody> {
    if let Ok(commit) = HeaderValue::from_str(&version.commit) {
        response.headers_mut().insert(REPO_COMMIT, commit);
    }
    response
}

fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.').map(|(_, extension)| extension) {
        Some("json") => "application/json",
        Some("txt" | "md" | "py" | "jinja") => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

/// The start of a hub, for scripts.
pub(super) fn started(address: &str, token: Option<&str>, repos: &BTreeMap<String, VersionId>) -> Value {
    let repos = repos.iter().map(|(repo, id)| {
        json!({ "repo": repo, "topic": id.topic.as_str(), "epoch": id.epoch.to_string(), "version": id.version.0 })
    });
    json!({ "hub": address, "token": token, "repos": repos.collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_of_a_proxy_with_tls_is_told_addresses_with_tls() {
        for (scheme, server) in [
            (None, "http://hub.svc:8470"),
            (Some("https"), "https://hub.svc:8470"),
            (Some("ftp"), "http://hub.svc:8470"),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, HeaderValue::from_static("hub.svc:8470"));
            headers.extend(scheme.map(|scheme| (FORWARDED_SCHEME, HeaderValue::from_static(scheme))));
            assert_eq!(server_of(&headers), server);
        }
    }

    #[test]
    fn paths_come_as_a_form_or_as_json() {
        let headers = |kind: &'static str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
            headers
        };
        let wanted = |paths: &[&str], expand| {
            Ok(PathsWanted { paths: paths.iter().map(ToString::to_string).collect(), expand })
        };
        let form = headers("application/x-www-form-urlencoded");
        assert_eq!(
            PathsWanted::parse(&form, b"paths=a%2Fb&paths=c+d&expand=True&x=1"),
            wanted(&["a/b", "c d"], true)
        );
        assert_eq!(PathsWanted::parse(&form, b""), wanted(&[], false));
        assert!(PathsWanted::parse(&form, b"paths=%ff").is_err());
        let json = headers("application/json; charset=utf-8");
        assert_eq!(PathsWanted::parse(&json, br#"{"paths": ["a"]}"#), wanted(&["a"], false));
        assert!(PathsWanted::parse(&json, b"[]").is_err());
    }
}
