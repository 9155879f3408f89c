//! Lists a bucket: runs, steps, and which of them are whole.

use std::collections::{BTreeMap, BTreeSet};

use mainstay_checkpoint::inventory::{Copy, Medium, Shard, StepKey, StepState};
use mainstay_checkpoint_format::bucket::{
    MAX_RECORD_BYTES, STEP_NAME, StepRecord, run_directory, shard_names, step_of_directory,
};
use tokio_stream::StreamExt;

use crate::bucket::{Bucket, DurableError};
use crate::upload::in_step;

/// The steps of a run, by directory name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepsByName {
    /// Whole steps.
    pub whole: BTreeMap<String, StepRecord>,
    /// Steps that a host has started to upload.
    pub started: BTreeSet<String>,
    /// Steps with a damaged record, with the problem. They count as neither whole nor started.
    pub damaged: BTreeMap<String, String>,
}

/// A record as a type of the core.
#[must_use]
pub fn key(record: &StepRecord) -> StepKey {
    let name = record.name.clone();
    StepKey {
        step: name.step,
        job: name.job.into(),
        run: name.run.into(),
        attempt: name.attempt,
        world: name.world_size,
    }
}

/// The shards of a record, as a type of the core.
#[must_use]
pub fn shards(record: &StepRecord) -> Vec<Shard> {
    let step_key = key(record);
    let shard = |(rank, shard): (u32, &mainstay_checkpoint_format::bucket::StepShard)| Shard {
        key: step_key.clone(),
        rank,
        root: shard.root.clone(),
        bytes: shard.bytes,
        created: i64::try_from(shard.created_unix_s).unwrap_or(i64::MAX),
        piece: None,
    };
    (0..).zip(&record.shards).map(shard).collect()
}

/// The shards of a record as copies that any host may fetch. `holder`: the name of the storage.
#[must_use]
pub fn copies(record: &StepRecord, holder: &str) -> Vec<Copy> {
    let copy = |shard| Copy {
        holder: holder.into(),
        medium: Medium::Durable,
        own: false,
        // According to the record; each byte is verified when it is fetched.
        verified: true,
        shard,
    };
    shards(record).into_iter().map(copy).collect()
}

/// The record of a step on hosts, to write when all its shards are in the bucket too; none while a rank is missing.
#[must_use]
pub fn record(state: &StepState) -> Option<StepRecord> {
    let shard = |rank| {
        let shard = &state.ranks.get(&rank)?.first()?.shard;
        Some(mainstay_checkpoint_format::bucket::StepShard {
            root: shard.root.clone(),
            bytes: shard.bytes,
            created_unix_s: u64::try_from(shard.created).unwrap_or(0),
        })
    };
    let shards: Option<Vec<_>> = (0..state.key.world).map(shard).collect();
    Some(StepRecord { name: crate::upload::step_name(&state.key), shards: shards? })
}

/// The directories of all runs.
///
/// # Errors
/// The store does not answer.
pub async fn runs(bucket: &Bucket) -> Result<Vec<String>, DurableError> {
    let names = directories(bucket, "").await?;
    Ok(names.into_iter().filter(|name| !name.starts_with('.')).collect())
}

/// The steps in a run's directory. Steps in `known` are not read again: a record never changes.
///
/// # Errors
/// The store does not answer.
pub async fn steps(bucket: &Bucket, run: &str, known: &StepsByName) -> Result<StepsByName, DurableError> {
    let mut found = StepsByName::default();
    for name in directories(bucket, run).await? {
        if step_of_directory(&name).is_none() {
            continue;
        }
        if let Some(record) = known.whole.get(&name) {
            found.whole.insert(name, record.clone());
            continue;
        }
        let content = bucket.get(&format!("{run}/{name}/{STEP_NAME}"), MAX_RECORD_BYTES).await;
        match content.map(|content| content.map(|content| StepRecord::decode(&content))) {
            Ok(None) => drop(found.started.insert(name)),
            // A record under another step's name is invalid: a copied object would offer old bytes as new.
            Ok(Some(Ok(record))) if record.name.directory() == name => drop(found.whole.insert(name, record)),
            Ok(Some(Ok(_))) => drop(found.damaged.insert(name, "its record is another step's".to_owned())),
            Ok(Some(Err(error))) => drop(found.damaged.insert(name, error.to_string())),
            Err(error @ DurableError::Changed { .. }) => drop(found.damaged.insert(name, error.to_string())),
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

/// The steps of a run by its id.
///
/// # Errors
/// The store does not answer.
pub async fn list_run(
    bucket: &Bucket,
    run_id: &str,
    known: &StepsByName,
) -> Result<StepsByName, DurableError> {
    steps(bucket, &run_directory(run_id), known).await
}

/// The ranks whose bytes and manifest are not in the bucket yet, at most 64 of them.
///
/// # Errors
/// The store does not answer.
pub async fn missing(bucket: &Bucket, record: &StepRecord) -> Result<Vec<u32>, DurableError> {
    let sizes = objects(bucket, &in_step(&record.name, "")).await?;
    let lies = |(rank, shard): &(u32, &mainstay_checkpoint_format::bucket::StepShard)| {
        let (data, manifest) = shard_names(*rank, &shard.root);
        sizes.get(&data) == Some(&shard.bytes) && sizes.contains_key(&manifest)
    };
    let ranks = (0..).zip(&record.shards).filter(|shard| !lies(shard)).map(|(rank, _)| rank);
    Ok(ranks.take(64).collect())
}

/// Deletes a step, its record first, so that the step exists completely or not at all.
///
/// # Errors
/// The store refuses. The remaining objects are not a step, and the next call deletes them.
pub async fn delete(bucket: &Bucket, run: &str, step: &str) -> Result<(), DurableError> {
    let home = format!("{run}/{step}");
    bucket.delete(&format!("{home}/{STEP_NAME}")).await?;
    for name in objects(bucket, &home).await?.into_keys() {
        bucket.delete(&format!("{home}/{name}")).await?;
    }
    Ok(())
}

async fn directories(bucket: &Bucket, name: &str) -> Result<Vec<String>, DurableError> {
    let path = bucket.path(name);
    let listed = bucket.again("listing", &path, || bucket.store.list_with_delimiter(Some(&path))).await?;
    let last =
        |path: &object_store::path::Path| path.parts().next_back().map(|part| part.as_ref().to_owned());
    Ok(listed.common_prefixes.iter().filter_map(last).collect())
}

/// The objects in a directory, with their sizes.
async fn objects(bucket: &Bucket, name: &str) -> Result<BTreeMap<String, u64>, DurableError> {
    let path = bucket.path(name);
    let all = || async {
        let mut found = BTreeMap::new();
        let mut objects = bucket.store.list(Some(&path));
        while let Some(object) = objects.next().await {
            let object = object?;
            if let Some(name) = object.location.parts().next_back() {
                found.insert(name.as_ref().to_owned(), object.size);
            }
        }
        Ok(found)
    };
    bucket.again("listing", &path, all).await
}
