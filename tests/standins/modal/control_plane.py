"""The control plane: apps, images, volumes and sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from typing import Any

from google.protobuf import empty_pb2
from grpclib import GRPCError, Status
from grpclib.server import Stream
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

from .calls import refuse_unmodelled_calls, token, unary
from .sandboxes import Box
from .standin import Standin

Result = api_pb2.GenericResult
PAGE = 50  # sandboxes in one page of a list


@refuse_unmodelled_calls(ModalClientBase)
class ControlPlane(ModalClientBase):
    """The calls at MODAL_SERVER_URL."""

    def __init__(self, standin: Standin) -> None:
        self.standin = standin

    def authorize(self, metadata: Any, _request: Any) -> None:
        self.standin.authorize(metadata)

    @unary
    async def ClientHello(self, _request: Any) -> Any:
        return api_pb2.ClientHelloResponse()

    @unary
    async def AuthTokenGet(self, _request: Any) -> Any:
        return api_pb2.AuthTokenGetResponse(token=token())

    @unary
    async def EnvironmentGetOrCreate(self, request: Any) -> Any:
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name=request.deployment_name or "main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-standin", metadata=metadata)

    @unary
    async def AppGetOrCreate(self, request: Any) -> Any:
        apps = self.standin.apps
        if request.app_name not in apps and not request.object_creation_type:
            raise GRPCError(Status.NOT_FOUND, f"App {request.app_name} not found")
        number = apps.setdefault(request.app_name, f"ap-{secrets.token_hex(11)}")
        return api_pb2.AppGetOrCreateResponse(app_id=number, handle_metadata=api_pb2.AppHandleMetadata(app_id=number))

    @unary
    async def VolumeGetOrCreate(self, request: Any) -> Any:
        volume = self.standin.volume(request.deployment_name, request.version or api_pb2.VOLUME_FS_VERSION_V1)
        metadata = api_pb2.VolumeMetadata(version=volume.version, name=volume.name)  # type: ignore[arg-type]
        return api_pb2.VolumeGetOrCreateResponse(
            volume_id=volume.id,
            version=volume.version,  # type: ignore[arg-type]
            metadata=metadata,
        )

    @unary
    async def SecretGetOrCreate(self, request: Any) -> Any:
        number = f"st-{secrets.token_hex(11)}"
        self.standin.secrets[number] = dict(request.env_dict)
        return api_pb2.SecretGetOrCreateResponse(secret_id=number)

    @unary
    async def VolumeList(self, request: Any) -> Any:
        items = []
        for volume in self.standin.volumes.values():
            creation = api_pb2.CreationInfo(created_at=volume.created_at)
            metadata = api_pb2.VolumeMetadata(
                version=volume.version,  # type: ignore[arg-type]
                name=volume.name,
                creation_info=creation,
            )
            items.append(api_pb2.VolumeListItem(label=volume.name, volume_id=volume.id, metadata=metadata))
        return api_pb2.VolumeListResponse(items=items)

    @unary
    async def ImageGetOrCreate(self, request: Any) -> Any:
        digest = hashlib.sha256(request.image.SerializeToString(deterministic=True)).hexdigest()
        number, images = f"im-{digest[:22]}", self.standin.images
        if number not in images or images[number]["result"].status == Result.GENERIC_STATUS_FAILURE:
            images[number] = {"commands": [], "packages": "", "root": "", "result": Result(), "built": asyncio.Event()}
            images[number]["task"] = asyncio.create_task(self.standin.build(number, request.image))
        return api_pb2.ImageGetOrCreateResponse(image_id=number, result=images[number]["result"])

    async def ImageJoinStreaming(self, stream: Stream[Any, Any]) -> None:
        request = await stream.recv_message()
        assert request is not None
        assert stream.metadata is not None
        await self.standin.faults.before("ImageJoinStreaming", stream)
        self.authorize(stream.metadata, request)
        image = self.standin.images[request.image_id]
        await image["built"].wait()
        await stream.send_message(api_pb2.ImageJoinStreamingResponse(result=image["result"], entry_id="1", eof=True))

    # -- sandboxes

    def _access(self, box: Box) -> Any:
        return api_pb2.CommandRouterAccess(url=self.standin.router_url, jwt=token(task=box.task))

    @unary
    async def SandboxCreateV2(self, request: Any) -> Any:
        box = await self.standin.create(request)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=box.id,
            task_id=box.task,
            metadata=api_pb2.SandboxHandleMetadata(app_id=box.app),
            command_router_access=self._access(box),
        )

    @unary
    async def SandboxGetTaskIdV2(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        if box.ending:
            return api_pb2.SandboxGetTaskIdResponse(task_result=Result(status=Result.GENERIC_STATUS_TERMINATED))
        return api_pb2.SandboxGetTaskIdResponse(task_id=box.task)

    @unary
    async def SandboxGetCommandRouterAccess(self, request: Any) -> Any:
        known = self.standin.tasks.get(request.task_id) or self.standin.of_id(request.sandbox_id)
        access = self._access(known)
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt)

    @unary
    async def SandboxTerminateV2(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        await self.standin.end(box, Result.GENERIC_STATUS_TERMINATED)
        return api_pb2.SandboxTerminateResponse(existing_result=box.result())

    @unary
    async def SandboxWaitV2(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout):
                await box.ended.wait()
        return api_pb2.SandboxWaitResponse(result=box.result(), metadata=api_pb2.SandboxHandleMetadata(app_id=box.app))

    @unary
    async def SandboxTagsGetV2(self, request: Any) -> Any:
        tags = self.standin.of_id(request.sandbox_id).tags
        return api_pb2.SandboxTagsGetResponse(
            tags=[api_pb2.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        )

    @unary
    async def SandboxTagsSetV2(self, request: Any) -> Any:
        box = self.standin.of_id(request.sandbox_id)
        box.tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        return empty_pb2.Empty()

    @unary
    async def SandboxListV2(self, request: Any) -> Any:
        wanted = {tag.tag_name: tag.tag_value for tag in request.tags}
        sandboxes = [
            box
            for box in self.standin.boxes.values()
            if not box.ending
            and (not request.app_id or box.app == request.app_id)
            and wanted.items() <= box.tags.items()
            and (not request.before_timestamp or box.created < request.before_timestamp)
        ]
        sandboxes.sort(key=lambda box: -box.created)
        return api_pb2.SandboxListResponse(
            sandboxes=[
                api_pb2.SandboxInfo(id=box.id, created_at=box.created, app_id=box.app, name=box.name)
                for box in sandboxes[:PAGE]
            ]
        )

    @unary
    async def SandboxGetFromNameV2(self, request: Any) -> Any:
        app = self.standin.apps.get(request.app_name)
        for box in self.standin.boxes.values():
            if (box.app, box.name, box.ending) == (app, request.sandbox_name, False):
                return api_pb2.SandboxGetFromNameResponse(
                    sandbox_id=box.id, metadata=api_pb2.SandboxHandleMetadata(app_id=box.app)
                )
        raise GRPCError(Status.NOT_FOUND, f"Sandbox {request.sandbox_name} not found")
