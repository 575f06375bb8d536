//! The REST API and `/metrics` over HTTP.

mod ask;
mod auth;
pub(crate) mod joins;
pub mod listen;
mod room;
mod serve;
mod tls;

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use api::endpoint::{
    AddPoolDisks, AddVolumeCopy, AllowInitiators, ApproveJoin, ClearChap, ClearPoolErrors,
    ClearReservations, DeletePool, DeleteVolume, DenyInitiators, DrainNode, Endpoint,
    FindStrayPools, ForcePoolOpen, ForceVolume, GetCluster, GetHealth, GetPool, GetReservations,
    GetStatus, GetVolume, GrowVolume, InitCluster, ListJoins, ListOrphans, ListPools, ListSessions,
    ListTokens, ListVolumes, MapTarget, Nothing, Payload, PostAdoption, PostDiscard, PostJoin,
    PostLeave, PostPool, PostPoolImport, PostRecovery, PostToken, PostVolume, PostVolumes,
    RefuseJoin, RemovePoolDisk, RemoveVolumeCopy, ReplacePoolDisk, ReplaceVolumeCopy, ResumeNode,
    RevokeToken, RotateCluster, ScrubPool, SetChap, SetHostDhchap, SetHostTls, SetInitiatorChap,
    SetProtocols, SetVolumeCopies, SwitchVolume, TakeOverVolume, VerifyVolume,
};
use api::{ApiError, Code};
use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, get, on};

use crate::control::Control;
use crate::engine::Scope;
use crate::metrics;
use ask::Ask;
pub use auth::{Token, TokenError};
pub use room::Capacity;
pub use serve::{Door, Server, TlsAcceptorDebug};
pub use tls::{TlsError, acceptor};

/// Who asks over TCP: an extension of the request.
#[derive(Clone, Debug)]
struct Peer {
    at: SocketAddr,
    /// Set once it has shown the token: its connection makes room for nobody then.
    known: Arc<AtomicBool>,
}

/// The API of a node.
pub fn router(control: &Control) -> Router {
    let c = control;
    let router = Router::new();
    let router = add::<GetHealth, _, _>(router, c, |c, _| async move { Ok(c.health()) });
    let router = add::<GetStatus, _, _>(router, c, |c, _| async move { Ok(c.status().await) });
    let router = add::<ListSessions, _, _>(router, c, |c, _| async move { Ok(c.sessions().await) });
    let router = add::<ListVolumes, _, _>(router, c, |c, _| async move { Ok(c.list().await) });
    let router = add::<PostVolume, _, _>(router, c, |c, a| async move {
        c.check_keeps_data()?;
        c.create(a.body).await
    });
    let router = add::<PostVolumes, _, _>(router, c, |c, a| async move {
        c.check_keeps_data()?;
        c.create_all(a.body.volumes).await
    });
    let router = add::<GetVolume, _, _>(router, c, |c, a| async move { c.show(&a.name()?).await });
    let router = add::<DeleteVolume, _, _>(router, c, |c, a| async move {
        let (force, discard) = (a.flag(api::endpoint::FORCE), a.flag(api::endpoint::DISCARD));
        c.delete(a.name()?, force, discard).await.map(|()| Nothing)
    });
    let router = add::<GrowVolume, _, _>(router, c, |c, a| async move {
        c.grow(a.name()?, a.body.size_bytes).await
    });
    let router = add::<SetProtocols, _, _>(router, c, |c, a| async move {
        c.set_protocols(a.name()?, a.body).await
    });
    let router = add::<MapTarget, _, _>(router, c, |c, a| async move {
        let force = a.flag(api::endpoint::MAP_FORCE);
        c.map(a.name()?, a.body, force).await
    });
    let router = with_pools(with_access(with_copies(router, c), c), c);
    cluster_routes(router, c)
        .route(
            "/v1/openapi.json",
            get(|| async { json_text(StatusCode::OK, api::openapi::json()) }),
        )
        .merge(metrics_router(control))
        .fallback(|request: Request| async move {
            refusal(
                &ApiError::new(Code::NotFound, format!("there is no {}", request.uri().path()))
                    .hint("GET /v1/openapi.json describes what there is"),
            )
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let (method, path) = (request.method(), request.uri().path());
            refusal(
                &ApiError::new(Code::MethodNotAllowed, format!("{path} does not know {method}"))
                    .hint("GET /v1/openapi.json describes what there is"),
            )
        })
}

/// Adds what says who may use a volume, and who has reserved it.
fn with_access(router: Router, c: &Control) -> Router {
    let router = add::<AllowInitiators, _, _>(router, c, |c, a| async move {
        c.allow(a.name()?, a.body.initiators).await
    });
    let router = add::<DenyInitiators, _, _>(router, c, |c, a| async move {
        c.deny(a.name()?, a.body.initiators).await
    });
    let router =
        add::<SetChap, _, _>(
            router,
            c,
            |c, a| async move { c.set_chap(a.name()?, Some(a.body)).await },
        );
    let router =
        add::<ClearChap, _, _>(router, c, |c, a| async move { c.set_chap(a.name()?, None).await });
    let router = add::<SetInitiatorChap, _, _>(router, c, |c, a| async move {
        c.set_initiator_chap(a.name()?, a.body).await
    });
    let router = add::<SetHostDhchap, _, _>(router, c, |c, a| async move {
        c.set_host_dhchap(a.name()?, a.body).await
    });
    let router = add::<SetHostTls, _, _>(router, c, |c, a| async move {
        c.set_host_tls(a.name()?, a.body).await
    });
    let router =
        add::<GetReservations, _, _>(
            router,
            c,
            |c, a| async move { c.reservations(&a.name()?).await },
        );
    add::<ClearReservations, _, _>(router, c, |c, a| async move {
        c.clear_reservations(&a.name()?).await
    })
}

/// What is done with the copies of volumes.
fn with_copies(router: Router, c: &Control) -> Router {
    let router =
        add::<AddVolumeCopy, _, _>(
            router,
            c,
            |c, a| async move { c.add_copy(a.name()?, a.body).await },
        );
    let router = add::<RemoveVolumeCopy, _, _>(router, c, |c, a| async move {
        c.remove_copy(a.name()?, a.body).await
    });
    let router = add::<ReplaceVolumeCopy, _, _>(router, c, |c, a| async move {
        c.replace_copy(a.name()?, a.body).await
    });
    let router = add::<SetVolumeCopies, _, _>(router, c, |c, a| async move {
        c.set_copies(a.name()?, a.body).await
    });
    let router = add::<VerifyVolume, _, _>(router, c, |c, a| async move {
        c.verify(&a.name()?, a.body.keep).await
    });
    let router =
        add::<SwitchVolume, _, _>(
            router,
            c,
            |c, a| async move { c.switch(a.name()?, a.body).await },
        );
    let router =
        add::<ForceVolume, _, _>(router, c, |c, a| async move { c.force(a.name()?, a.body).await });
    add::<TakeOverVolume, _, _>(
        router,
        c,
        |c, a| async move { c.take_over(a.name()?, a.body).await },
    )
}

/// What is done with pools of disks.
fn with_pools(router: Router, c: &Control) -> Router {
    let router = add::<ListPools, _, _>(router, c, |c, _| async move { Ok(c.pools().await) });
    let router = add::<PostPool, _, _>(router, c, |c, a| async move {
        c.check_keeps_data()?;
        c.create_pool(a.body).await
    });
    let router = add::<GetPool, _, _>(router, c, |c, a| async move { c.pool(&a.pool()?).await });
    let router = add::<DeletePool, _, _>(router, c, |c, a| async move {
        let force = a.flag(api::endpoint::POOL_FORCE);
        c.delete_pool(a.pool()?, force).await.map(|()| Nothing)
    });
    let router =
        add::<AddPoolDisks, _, _>(
            router,
            c,
            |c, a| async move { c.add_disks(a.pool()?, a.body).await },
        );
    let router = add::<RemovePoolDisk, _, _>(router, c, |c, a| async move {
        c.remove_disk(a.pool()?, a.body).await
    });
    let router = add::<ReplacePoolDisk, _, _>(router, c, |c, a| async move {
        c.replace_disk(a.pool()?, a.body).await
    });
    let router =
        add::<ScrubPool, _, _>(router, c, |c, a| async move { c.scrub_pool(a.pool()?).await });
    let router = add::<ClearPoolErrors, _, _>(router, c, |c, a| async move {
        c.clear_pool_errors(a.pool()?, a.body).await
    });
    add::<ForcePoolOpen, _, _>(
        router,
        c,
        |c, a| async move { c.open_without(a.pool()?, a.body).await },
    )
}

/// What is done when records are lost.
fn with_recovery(router: Router, c: &Control) -> Router {
    let router = add::<ListOrphans, _, _>(router, c, |c, _| async move { c.orphans().await });
    let router = add::<PostAdoption, _, _>(router, c, |c, a| async move { c.adopt(a.body).await });
    let router = add::<PostDiscard, _, _>(router, c, |c, a| async move {
        c.discard(a.body).await.map(|()| Nothing)
    });
    let router =
        add::<FindStrayPools, _, _>(router, c, |c, a| async move { c.find_pools(a.body).await });
    let router =
        add::<PostPoolImport, _, _>(router, c, |c, a| async move { c.import_pool(a.body).await });
    add::<PostRecovery, _, _>(router, c, |c, a| async move { c.recover(a.body).await })
}

/// What concerns the cluster.
fn cluster_routes(router: Router, c: &Control) -> Router {
    let router = with_recovery(router, c);
    let router = add::<GetCluster, _, _>(router, c, |c, _| async move { Ok(c.cluster().await) });
    let router = add::<InitCluster, _, _>(router, c, |c, a| async move { c.init(a.body).await });
    let router = add::<PostJoin, _, _>(router, c, |c, a| async move { c.join(a.body).await });
    let router = add::<PostLeave, _, _>(router, c, |c, a| async move { c.leave(a.body).await });
    let router = admission_routes(router, c);
    let router =
        add::<DrainNode, _, _>(
            router,
            c,
            |c, a| async move { c.set_drained(a.body.node, true).await },
        );
    add::<ResumeNode, _, _>(
        router,
        c,
        |c, a| async move { c.set_drained(a.body.node, false).await },
    )
}

/// Who may join the cluster.
fn admission_routes(router: Router, c: &Control) -> Router {
    let router =
        add::<PostToken, _, _>(router, c, |c, a| async move { c.create_token(a.body).await });
    let router = add::<ListTokens, _, _>(router, c, |c, _| async move { c.tokens().await });
    let router =
        add::<RotateCluster, _, _>(router, c, |c, _| async move { c.rotate_cluster().await });
    let router =
        add::<RevokeToken, _, _>(router, c, |c, a| async move { c.revoke_token(&a.body.id).await });
    let router = add::<ListJoins, _, _>(router, c, |c, _| async move { c.joins().await });
    let router =
        add::<ApproveJoin, _, _>(
            router,
            c,
            |c, a| async move { c.decide_join(&a.body.id, true).await },
        );
    add::<RefuseJoin, _, _>(router, c, |c, a| async move { c.decide_join(&a.body.id, false).await })
}

/// Metrics alone.
pub fn metrics_router(control: &Control) -> Router {
    let control = control.clone();
    let answer = move || {
        let control = control.clone();
        async move {
            let page = metrics::render(control.facts(Scope::InFull).await);
            ([(header::CONTENT_TYPE, metrics::MEDIA_TYPE)], page)
        }
    };
    Router::new().route("/metrics", get(answer))
}

/// Routes one endpoint; types and path are the endpoint's own.
fn add<E, F, Fut>(router: Router, control: &Control, answer: F) -> Router
where
    E: Endpoint + 'static,
    F: Fn(Control, Ask<E>) -> Fut + Clone + Send + Sync + 'static,
    Fut: Future<Output = Result<E::Answer, ApiError>> + Send + 'static,
{
    let filter = MethodFilter::try_from(E::METHOD).expect("endpoints use common methods");
    let control = control.clone();
    let handler = move |request: Request| {
        let (control, answer) = (control.clone(), answer.clone());
        async move {
            let answered = match Ask::<E>::read(request).await {
                Ok(ask) => answer(control, ask).await,
                Err(e) => Err(e),
            };
            answered.map_or_else(|e| refusal(&e), |a| respond::<E>(&a))
        }
    };
    router.route(E::PATH, on(filter, handler))
}

fn respond<E: Endpoint>(answer: &E::Answer) -> Response {
    let status = StatusCode::from_u16(E::STATUS).unwrap_or(StatusCode::OK);
    if E::Answer::EMPTY {
        return status.into_response();
    }
    match serde_json::to_string(answer) {
        Ok(text) => json_text(status, text),
        Err(error) => {
            tracing::error!(%error, endpoint = E::ID, "an answer cannot be written");
            refusal(&ApiError::new(Code::Internal, "the answer cannot be written"))
        }
    }
}

fn json_text(status: StatusCode, text: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], Body::from(text)).into_response()
}

/// A refusal as it is sent.
fn refusal(error: &ApiError) -> Response {
    let status = StatusCode::from_u16(error.code.status());
    let text = serde_json::to_string(error).expect("three strings always serialise");
    json_text(status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR), text)
}
