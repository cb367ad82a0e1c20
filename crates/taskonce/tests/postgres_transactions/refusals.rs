//! Databases that cannot be used so: nothing runs, nothing stays claimed, and the error says what to do.

use taskonce::postgres::{CompleteIn as _, RunInTransaction as _};
use taskonce::{Admission, ErrorKind, Outcome, State};

use crate::place::{EFFECT, Place, WORKER, found, policy, task};

/// A claim that the transaction cannot see, since it began before: at READ COMMITTED it sees it, at a stricter level it is told.
#[tokio::test]
async fn a_transaction_that_began_before_the_claim_is_told_so() {
    let place = Place::new();
    for (level, is_seen) in [("read committed", true), ("repeatable read", false), ("serializable", false)] {
        let (ledger, task) = (place.ledger(), task(level));
        let mut client = place.client_with(&format!("set default_transaction_isolation = '{level}'")).await;
        let tx = client.transaction().await.unwrap();
        tx.execute("select 1", &[]).await.unwrap();
        let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
        match claim.lock_in(&tx).await {
            Ok(()) => assert!(is_seen, "{level}"),
            Err(error) => {
                assert!(!is_seen && error.kind() == ErrorKind::Unsupported, "{level}: {error:?}");
                assert!(error.hint().contains("after the claim"), "{error:?}");
                // It is still held, and can be locked in another one.
                tx.rollback().await.unwrap();
                let tx = client.transaction().await.unwrap();
                claim.lock_in(&tx).await.unwrap();
            }
        }
    }
}

#[tokio::test]
async fn a_user_who_lacks_a_right_and_a_read_only_session_are_told_and_nothing_stays_claimed() {
    let place = Place::new();
    place.database.psql("create role stranger login; grant all on effect to stranger").unwrap_or_default();
    let ledger = place.ledger();
    for (id, url, settings, kind, hint) in [
        ("stranger", place.client_url().replace(WORKER, "stranger"), "", ErrorKind::Denied, "--grant-to"),
        ("read-only", place.client_url(), "set default_transaction_read_only = on", ErrorKind::ReadOnly, "primary"),
    ] {
        let (task, mut client) = (task(id), crate::place::connect(&url).await);
        client.batch_execute(settings).await.unwrap();
        let policy = policy();
        let refused = ledger.run_in_transaction(&mut client, &task, &policy, |_, _| Box::pin(async { Ok(1) })).await;
        let error = refused.unwrap_err();
        assert_eq!(error.kind(), kind, "{error:?}");
        assert!(error.hint().contains(hint), "{error:?}");
        let record = found(&ledger, &task).await.record;
        assert_eq!((record.state, record.attempt), (State::Waiting, 0), "{id}");
        let mut client = place.client().await;
        let outcome = ledger.run_in_transaction(&mut client, &task, &policy, |tx, context| {
            Box::pin(async move { Ok(tx.execute(EFFECT, &[&context.key().as_str()]).await?) })
        });
        let outcome = outcome.await.unwrap();
        assert!(matches!(outcome, Outcome::Ran { .. }), "{outcome:?}");
        assert_eq!(place.effects(&task.key).await, 1);
    }
}
