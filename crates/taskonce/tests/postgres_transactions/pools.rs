//! Connections of a pool of the user's own, `deadpool-postgres`: each form takes one, and gives it back fit for use.

use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Pool, RecyclingMethod};
use taskonce::postgres::tokio_postgres::{Client, Config, NoTls};
use taskonce::postgres::{CommitIn as _, CompleteIn as _, RunInTransaction as _, StepIn as _};
use taskonce::{Admission, Effect, Failure, Outcome, Output, Policy, Run as _, State};

use crate::place::{EFFECT, Place, found, policy, task};

/// Of one connection, so that each form gets what the one before has left.
fn pool(place: &Place) -> Pool {
    let config: Config = place.client_url().parse().unwrap();
    let manager = Manager::from_config(config, NoTls, ManagerConfig { recycling_method: RecyclingMethod::Verified });
    Pool::builder(manager).max_size(1).build().unwrap()
}

#[tokio::test]
async fn a_claim_is_locked_and_completed_on_a_connection_of_the_users_pool() {
    let (place, task) = (Place::new(), task("a"));
    let (pool, ledger) = (pool(&place), place.ledger());
    let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
    {
        let mut lent = pool.get().await.unwrap();
        // The pool's own transaction cannot be handed over for the commit: this is the driver's.
        let client: &mut Client = &mut lent;
        let tx = client.transaction().await.unwrap();
        claim.lock_in(&tx).await.unwrap();
        tx.execute(EFFECT, &[&task.key.as_str()]).await.unwrap();
        let completion = claim.complete_in(&tx, Output::kept("text/plain", "receipt")).await.unwrap();
        completion.commit_in(tx).await.unwrap();
    }
    let record = found(&ledger, &task).await.record;
    assert_eq!((record.state, &record.output), (State::Done, &Output::kept("text/plain", "receipt")));
    assert_eq!(place.effects(&task.key).await, 1);
    // What the transaction set has ended with it.
    let lent = pool.get().await.unwrap();
    let limits = "select current_setting('lock_timeout') || current_setting('idle_in_transaction_session_timeout')";
    assert_eq!(lent.query_one(limits, &[]).await.unwrap().get::<_, String>(0), "00");
}

#[tokio::test]
async fn a_claim_that_is_given_up_on_a_pools_connection_leaves_nothing_there() {
    let (place, task) = (Place::new(), task("a"));
    let (pool, ledger) = (pool(&place), place.ledger());
    let Admission::Run(claim) = ledger.claim(&task, &policy()).await.unwrap() else { panic!("it is free") };
    {
        let mut lent = pool.get().await.unwrap();
        // Only read and locked by the pool's own transaction, which is dropped: the pool gets its connection back.
        let tx = lent.transaction().await.unwrap();
        claim.lock_in(&tx).await.unwrap();
        tx.execute(EFFECT, &[&task.key.as_str()]).await.unwrap();
    }
    claim.release().await.unwrap();
    let outcome = ledger
        .run_in_transaction_on(
            |attempt| {
                let pool = pool.clone();
                Box::pin(async move {
                    let mut lent = pool.get().await?;
                    Ok(attempt.on(&mut lent).await)
                })
            },
            &task,
            &policy(),
            Duration::ZERO,
            |tx, context| {
                Box::pin(async move {
                    tx.execute(EFFECT, &[&context.key().as_str()]).await?;
                    Ok(())
                })
            },
        )
        .await
        .unwrap();
    assert!(matches!(outcome, Outcome::Ran { value: (), .. }), "{outcome:?}");
    assert_eq!(place.effects(&task.key).await, 1);
}

#[tokio::test]
async fn a_step_is_recorded_in_the_transaction_of_a_pools_connection() {
    let (place, task) = (Place::new(), task("a"));
    let (pool, ledger) = (pool(&place), place.ledger());
    let policy = Policy { effect: Effect::Keyed, ..policy() };
    let outcome = ledger.run(&task, &policy, |context| {
        let pool = &pool;
        async move {
            let mut lent = pool.get().await?;
            let tx = lent.transaction().await?;
            let key = context.key().as_str();
            let booked: u64 =
                context.step_in(&tx, "book", |_| async { Ok(tx.execute(EFFECT, &[&key]).await?) }).await?;
            tx.commit().await?;
            Ok::<_, Failure>(booked)
        }
    });
    let Outcome::Ran { value, record } = outcome.await.unwrap() else { panic!("it runs") };
    assert_eq!((value, record.steps.len(), place.effects(&task.key).await), (1, 1, 1));
}
