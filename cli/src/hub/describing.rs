//! The hub's answers about repositories, as JSON objects that Hugging Face's client reads.

use super::{names, version::HubVersion};
use serde_json::{Value, json};
use std::time::{SystemTime, UNIX_EPOCH};
use tensor_relay_client::VersionId;

/// The answer to `/api/whoami-v2`.
pub(super) fn identity() -> Value {
    json!({
        "type": "user",
        "id": "tensor-relay",
        "name": "tensor-relay",
        "fullname": "tensor-relay hub",
        "isPro": false,
        "orgs": [],
        "auth": { "type": "access_token", "accessToken": { "displayName": "hub", "role": "read" } },
    })
}

/// An entry of `/api/models`.
pub(super) fn entry(repo: &str, newest: &VersionId) -> Value {
    json!({
        "id": repo,
        "modelId": repo,
        "author": repo.split_once('/').map(|(author, _)| author),
        "sha": names::commit(newest),
        "private": true,
        "gated": false,
        "disabled": false,
        "tags": ["tensor-relay"],
        "downloads": 0,
        "likes": 0,
    })
}

/// A repository at a version.
pub(super) fn info(repo: &str, version: &HubVersion) -> Value {
    let siblings = version
        .files()
        .iter()
        .map(|file| json!({ "rfilename": file.name, "size": file.bytes, "blobId": file.tag }));
    let mut info = entry(repo, &version.id);
    info["siblings"] = siblings.collect();
    info["lastModified"] = timestamp(version.seen).into();
    info["createdAt"] = timestamp(version.seen).into();
    info["usedStorage"] = version.files().iter().map(|file| file.bytes).sum::<u64>().into();
    info
}

/// Files of a tree. With `expand`, with the commit that each is of.
pub(super) fn tree<'v>(
    version: &'v HubVersion,
    files: impl Iterator<Item = usize> + 'v,
    expand: bool,
) -> Vec<Value> {
    let commit = json!({
        "id": version.commit,
        "title": format!("{} version {}", version.id.topic, version.id.version),
        "date": timestamp(version.seen),
    });
    let files = files.filter_map(|position| version.files().get(position)).map(|file| {
        let mut entry = json!({ "type": "file", "path": file.name, "size": file.bytes, "oid": file.tag });
        if expand {
            entry["lastCommit"] = commit.clone();
        }
        entry
    });
    files.collect()
}

/// The branches and tags of a repository: its newest version, which is all that the hub knows without asking.
pub(super) fn refs(newest: &VersionId) -> Value {
    let commit = names::commit(newest);
    let (branch, tag) = (names::MAIN, format!("v{}", newest.version));
    json!({
        "branches": [{ "name": branch, "ref": format!("refs/heads/{branch}"), "targetCommit": commit }],
        "tags": [{ "name": tag, "ref": format!("refs/tags/{tag}"), "targetCommit": commit }],
        "converts": [],
    })
}

/// A time in UTC, e.g. `2026-11-27T23:57:38.000Z`.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    // Years that begin in March have the leap day at their end.
    let from_march = days + 719_468;
    let (era, day_of_era) = (from_march / 146_097, from_march % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let (day, month) = (day_of_year - (153 * from_march + 2) / 5 + 1, (from_march + 2) % 12 + 1);
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.000Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn times_are_dates() {
        for (seconds, date) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399, "2000-02-28T23:59:59.000Z"),
            (951_782_400, "2000-02-29T00:00:00.000Z"),
            (951_868_800, "2000-03-01T00:00:00.000Z"),
            (1_795_823_858, "2026-11-27T23:57:38.000Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(UNIX_EPOCH + Duration::from_secs(seconds)), date);
        }
    }
}
