//! The routes of the REST API and of `/metrics`: which method of the control plane answers which
//! endpoint.

use api::endpoint::{
    AddPoolDisks, AddReplica, AdoptImage, AllowInitiators, ApproveJoin, ClearChap, ClearPoolErrors,
    ClearReservations, CreatePool, CreateToken, CreateVolume, CreateVolumes, DeletePool,
    DeleteVolume, DenyInitiators, DiscardImage, DrainNode, FindImportablePools, ForcePrimary,
    GetCluster, GetHealth, GetPool, GetReservations, GetStatus, GetVolume, GrowVolume, ImportPool,
    InitCluster, JoinCluster, LeaveCluster, ListJoins, ListOrphanedImages, ListPools, ListSessions,
    ListTokens, ListVolumes, MapTarget, NoBody, OpenPool, RecoverCluster, RefuseJoin,
    RemovePoolDisk, RemoveReplica, ReplacePoolDisk, ReplaceReplica, ResumeNode, RevokeToken,
    RotateCredentials, ScrubPool, SetChap, SetHostDhchap, SetHostTls, SetInitiatorChap,
    SetProtocols, SetReplicaCount, SwitchPrimary, TakeOverVolume, VerifyVolume,
};
use api::{ApiError, ErrorCode};
use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::routing::get;
use engine::ReportScope;
use http_server::{add_endpoint, error_response, json_response};
use status::metrics;

use control::Control;
use control::volumes::VolumeControl;

/// The API of a node.
pub fn router(control: &Control) -> Router {
    let c = control;
    let router = Router::new();
    let router =
        add_endpoint::<GetHealth, _, _, _>(router, c, |c, _| async move { Ok(c.get_health()) });
    let router =
        add_endpoint::<GetStatus, _, _, _>(
            router,
            c,
            |c, _| async move { Ok(c.get_status().await) },
        );
    let router = add_endpoint::<ListSessions, _, _, _>(router, c, |c, _| async move {
        Ok(c.volumes().list_sessions().await)
    });
    let router = add_endpoint::<ListVolumes, _, _, _>(router, c, |c, _| async move {
        Ok(c.volumes().list_volumes().await)
    });
    let router = add_endpoint::<CreateVolume, _, _, _>(router, c, |c, a| async move {
        c.check_data_node()?;
        c.volumes().create_volume(a.body).await
    });
    let router = add_endpoint::<CreateVolumes, _, _, _>(router, c, |c, a| async move {
        c.check_data_node()?;
        c.volumes().create_volumes(a.body.volumes).await
    });
    let router = add_endpoint::<GetVolume, _, _, _>(router, c, |c, a| async move {
        c.volumes().get_volume(&a.volume_name()?).await
    });
    let router = add_endpoint::<DeleteVolume, _, _, _>(router, c, |c, a| async move {
        let (force, discard) =
            (a.flag(api::endpoint::DELETE_FORCE), a.flag(api::endpoint::DELETE_ALLOW_DATA_LOSS));
        c.volumes().delete_volume(a.volume_name()?, force, discard).await.map(|()| NoBody)
    });
    let router = add_endpoint::<GrowVolume, _, _, _>(router, c, |c, a| async move {
        c.volumes().grow(a.volume_name()?, a.body.size_bytes).await
    });
    let router = add_endpoint::<SetProtocols, _, _, _>(router, c, |c, a| async move {
        c.volumes().set_protocols(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<MapTarget, _, _, _>(router, c, |c, a| async move {
        let force = a.flag(api::endpoint::MAP_FORCE);
        c.volumes().map_target(a.volume_name()?, a.body, force).await
    });
    let router = with_pools(with_access(with_replicas(router, c.volumes()), c.volumes()), c);
    cluster_routes(router, c)
        .route(
            "/v1/openapi.json",
            get(|| async { json_response(StatusCode::OK, api::openapi::json()) }),
        )
        .merge(metrics_router(control))
        .fallback(|request: Request| async move {
            error_response(
                &ApiError::new(
                    ErrorCode::NotFound,
                    format!("there is no {}", request.uri().path()),
                )
                .with_hint("GET /v1/openapi.json describes the API"),
            )
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let (method, path) = (request.method(), request.uri().path());
            error_response(
                &ApiError::new(
                    ErrorCode::MethodNotAllowed,
                    format!("{path} does not support {method}"),
                )
                .with_hint("GET /v1/openapi.json describes the API"),
            )
        })
}

/// Routes for access to volumes and for reservations.
fn with_access(router: Router, c: &VolumeControl) -> Router {
    let router = add_endpoint::<AllowInitiators, _, _, _>(router, c, |c, a| async move {
        c.allow(a.volume_name()?, a.body.initiators).await
    });
    let router = add_endpoint::<DenyInitiators, _, _, _>(router, c, |c, a| async move {
        c.deny(a.volume_name()?, a.body.initiators).await
    });
    let router = add_endpoint::<SetChap, _, _, _>(router, c, |c, a| async move {
        c.set_chap(a.volume_name()?, Some(a.body)).await
    });
    let router = add_endpoint::<ClearChap, _, _, _>(router, c, |c, a| async move {
        c.set_chap(a.volume_name()?, None).await
    });
    let router = add_endpoint::<SetInitiatorChap, _, _, _>(router, c, |c, a| async move {
        c.set_initiator_chap(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<SetHostDhchap, _, _, _>(router, c, |c, a| async move {
        c.set_host_dhchap(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<SetHostTls, _, _, _>(router, c, |c, a| async move {
        c.set_host_tls(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<GetReservations, _, _, _>(router, c, |c, a| async move {
        c.reservations(&a.volume_name()?).await
    });
    add_endpoint::<ClearReservations, _, _, _>(router, c, |c, a| async move {
        c.clear_reservations(&a.volume_name()?).await
    })
}

/// Routes for replicas of volumes.
fn with_replicas(router: Router, c: &VolumeControl) -> Router {
    let router = add_endpoint::<AddReplica, _, _, _>(router, c, |c, a| async move {
        c.add_replica(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<RemoveReplica, _, _, _>(router, c, |c, a| async move {
        c.remove_replica(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<ReplaceReplica, _, _, _>(router, c, |c, a| async move {
        c.replace_replica(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<SetReplicaCount, _, _, _>(router, c, |c, a| async move {
        c.set_replicas_wanted(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<VerifyVolume, _, _, _>(router, c, |c, a| async move {
        c.verify_replicas(&a.volume_name()?, a.body.source).await
    });
    let router = add_endpoint::<SwitchPrimary, _, _, _>(router, c, |c, a| async move {
        c.switch_primary(a.volume_name()?, a.body).await
    });
    let router = add_endpoint::<ForcePrimary, _, _, _>(router, c, |c, a| async move {
        c.force_primary(a.volume_name()?, a.body).await
    });
    add_endpoint::<TakeOverVolume, _, _, _>(router, c, |c, a| async move {
        c.take_over_image(a.volume_name()?, a.body).await
    })
}

/// Routes for pools of disks.
fn with_pools(router: Router, control: &Control) -> Router {
    let c = control.pools();
    let router =
        add_endpoint::<ListPools, _, _, _>(
            router,
            c,
            |c, _| async move { Ok(c.list_pools().await) },
        );
    let router = add_endpoint::<CreatePool, _, _, _>(router, control, |control, a| async move {
        control.check_data_node()?;
        control.pools().create_pool(a.body).await
    });
    let router = add_endpoint::<GetPool, _, _, _>(router, c, |c, a| async move {
        c.get_pool(&a.pool_name()?).await
    });
    let router = add_endpoint::<DeletePool, _, _, _>(router, c, |c, a| async move {
        let force = a.flag(api::endpoint::POOL_FORCE);
        c.delete_pool(a.pool_name()?, force).await.map(|()| NoBody)
    });
    let router = add_endpoint::<AddPoolDisks, _, _, _>(router, c, |c, a| async move {
        c.add_pool_disks(a.pool_name()?, a.body).await
    });
    let router = add_endpoint::<RemovePoolDisk, _, _, _>(router, c, |c, a| async move {
        c.remove_pool_disk(a.pool_name()?, a.body).await
    });
    let router = add_endpoint::<ReplacePoolDisk, _, _, _>(router, c, |c, a| async move {
        c.replace_pool_disk(a.pool_name()?, a.body).await
    });
    let router = add_endpoint::<ScrubPool, _, _, _>(router, c, |c, a| async move {
        c.scrub_pool(a.pool_name()?).await
    });
    let router = add_endpoint::<ClearPoolErrors, _, _, _>(router, c, |c, a| async move {
        c.clear_pool_errors(a.pool_name()?, a.body).await
    });
    add_endpoint::<OpenPool, _, _, _>(router, c, |c, a| async move {
        c.force_open_pool(a.pool_name()?, a.body).await
    })
}

/// Routes for recovery from lost records.
fn with_recovery(router: Router, c: &Control) -> Router {
    let router = add_endpoint::<ListOrphanedImages, _, _, _>(router, c, |c, _| async move {
        c.volumes().list_orphans().await
    });
    let router = add_endpoint::<AdoptImage, _, _, _>(router, c, |c, a| async move {
        c.volumes().adopt_image(a.body).await
    });
    let router = add_endpoint::<DiscardImage, _, _, _>(router, c, |c, a| async move {
        c.volumes().discard_image(a.body).await.map(|()| NoBody)
    });
    let router = add_endpoint::<FindImportablePools, _, _, _>(router, c, |c, a| async move {
        c.pools().find_importable_pools(a.body).await
    });
    let router = add_endpoint::<ImportPool, _, _, _>(router, c, |c, a| async move {
        c.volumes().import_pool(a.body).await
    });
    add_endpoint::<RecoverCluster, _, _, _>(router, c, |c, a| async move {
        c.recover_cluster(a.body).await
    })
}

/// Routes for the cluster.
fn cluster_routes(router: Router, c: &Control) -> Router {
    let router = with_recovery(router, c);
    let router = add_endpoint::<GetCluster, _, _, _>(router, c, |c, _| async move {
        Ok(c.cluster().get_cluster().await)
    });
    let router = add_endpoint::<InitCluster, _, _, _>(router, c, |c, a| async move {
        c.cluster().init_cluster(a.body).await
    });
    let router = add_endpoint::<JoinCluster, _, _, _>(router, c, |c, a| async move {
        c.cluster().join_cluster(a.body).await
    });
    let router = add_endpoint::<LeaveCluster, _, _, _>(router, c, |c, a| async move {
        c.leave_cluster(a.body).await
    });
    let router = admission_routes(router, c);
    let router = add_endpoint::<DrainNode, _, _, _>(router, c, |c, a| async move {
        c.set_drained(a.body.node, true).await
    });
    add_endpoint::<ResumeNode, _, _, _>(router, c, |c, a| async move {
        c.set_drained(a.body.node, false).await
    })
}

/// Routes for admission of nodes, and for credential rotation.
fn admission_routes(router: Router, c: &Control) -> Router {
    let router = add_endpoint::<CreateToken, _, _, _>(router, c, |c, a| async move {
        c.cluster().create_token(a.body).await
    });
    let router = add_endpoint::<ListTokens, _, _, _>(router, c, |c, _| async move {
        c.cluster().list_tokens().await
    });
    let router = add_endpoint::<RotateCredentials, _, _, _>(router, c, |c, _| async move {
        c.cluster().rotate_cluster().await
    });
    let router = add_endpoint::<RevokeToken, _, _, _>(router, c, |c, a| async move {
        c.cluster().revoke_token(&a.body.id).await
    });
    let router = add_endpoint::<ListJoins, _, _, _>(router, c, |c, _| async move {
        c.cluster().list_joins().await
    });
    let router = add_endpoint::<ApproveJoin, _, _, _>(router, c, |c, a| async move {
        c.cluster().decide_join(&a.body.id, true).await
    });
    add_endpoint::<RefuseJoin, _, _, _>(router, c, |c, a| async move {
        c.cluster().decide_join(&a.body.id, false).await
    })
}

/// Serves only the metrics.
pub fn metrics_router(control: &Control) -> Router {
    let control = control.clone();
    let answer = move || {
        let control = control.clone();
        async move {
            let page = metrics::render(control.facts(ReportScope::AllWithLatency).await);
            ([(header::CONTENT_TYPE, metrics::MEDIA_TYPE)], page)
        }
    };
    Router::new().route("/metrics", get(answer))
}
